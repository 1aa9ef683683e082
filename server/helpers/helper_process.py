"""A helper process, `python -m server.helpers.helper_process FD`: follows the orders of one job, in turn.

Whatever a client has written is read here within bounds that the operating system keeps: the API process
kills this one when an order takes too long, and the kernel bounds its memory and its time on a processor.
"""

from __future__ import annotations

import importlib
import logging
import resource
import signal
import socket
import sys

import msgspec

from server.errors import ApiError, BadRequest, Internal
from server.helpers.memory import give_back, resident, set_most_memory
from server.helpers.messages import NO_MEMORY, FollowOrder, HelperSetup, sent_error
from worker import child, logs

MUCH, MOST_LEFT = 8 << 20, 128 << 20
"""Bytes left behind by orders: so many are given back to the system, and if that leaves more than the second
number the process ends, because some libraries give back little."""

_log = logging.getLogger(__name__)


def main() -> int:
    setup = msgspec.msgpack.decode(child.adopt(int(sys.argv[1])), type=HelperSetup)
    logs.setup(setup.name, setup.log_style)
    follow: FollowOrder = importlib.import_module(setup.module).open_job(setup.own)
    with socket.socket(fileno=setup.socket) as connection, connection.makefile("rb") as orders:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        set_most_memory(setup.memory, for_good=True)
        at_rest = left = resident()
        connection.sendall(child.framed(b""))
        while left <= at_rest + MOST_LEFT and (order := child.read_frame(orders)) is not None:
            data = child.read_frame(orders) or b""
            signal.setitimer(signal.ITIMER_PROF, setup.processor_seconds)
            found = answer(follow, order, data)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(child.framed(found))
            del order, data, found
            if resident() > left + MUCH:
                left = give_back()
    return child.STOPPED


def answer(follow: FollowOrder, order: bytes, data: bytes) -> bytes:
    """Follows an order, and returns the answer or error encoded."""
    try:
        return msgspec.msgpack.encode(follow(order, data))
    except ApiError as error:
        found = sent_error(error)
    except MemoryError:
        found = sent_error(BadRequest(NO_MEMORY))
    except Exception:
        _log.exception("an order could not be followed")
        found = sent_error(Internal("Internal server error"))
    return msgspec.msgpack.encode(found)


if __name__ == "__main__":
    sys.exit(main())
