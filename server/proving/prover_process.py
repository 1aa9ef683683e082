"""The process that compiles what clients ask of answers: `python -m server.proving.prover_process FD`."""

from __future__ import annotations

import importlib
import logging
import resource
import socket
import sys
from collections.abc import Mapping

import msgspec

from server.answers.writing.asked import AskedCalls, build_calls
from server.errors import ApiError, BadRequest, Internal
from server.grammars.building import Built, build
from server.grammars.structured_params import Asked
from server.offload.frames import frame, receive_frame
from server.offload.memory import give_back, resident, set_most_memory
from server.offload.refused import NO_MEMORY, Refused, refused
from worker import child, logs

MUCH, TOO_MUCH = 16 << 20, 128 << 20
"""Bytes left behind by grammars: so many are given back to the system; with so many the process ends."""

_log = logging.getLogger(__name__)

Question = Asked | AskedCalls
Proof = Built | Refused


class ProverSetup(msgspec.Struct, frozen=True):
    """What a prover is started with."""

    socket: int
    """The inherited descriptor of its end of the connection."""
    tokens: dict[str, int]
    """The ids of special tokens."""
    memory: int
    """Bytes of address space beyond those that it has when it waits."""
    log_level: str


def main() -> int:
    setup = msgspec.msgpack.decode(child.adopt(int(sys.argv[1])), type=ProverSetup)
    logs.setup("prover", setup.log_level)
    importlib.import_module("llguidance")  # before memory is bounded
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    set_most_memory(setup.memory, for_good=True)
    with socket.socket(fileno=setup.socket) as connection:
        _serve(connection, setup.tokens)
    return child.STOPPED


def _serve(connection: socket.socket, tokens: Mapping[str, int]) -> None:
    at_rest = resident()
    connection.sendall(frame(b""))
    while (data := receive_frame(connection)) is not None:
        connection.sendall(
            frame(msgspec.msgpack.encode(prove(msgspec.msgpack.decode(data, type=Question), tokens)))
        )
        if resident() > at_rest + MUCH:
            give_back()
        if resident() > at_rest + TOO_MUCH:
            return


def prove(asked: Question, tokens: Mapping[str, int]) -> Proof:
    try:
        return build_calls(asked) if isinstance(asked, AskedCalls) else build(asked, tokens)
    except ApiError as error:
        return refused(error)
    except MemoryError:
        return refused(BadRequest(NO_MEMORY, asked.field))
    except Exception:
        _log.exception("a grammar could not be read")
        return refused(Internal("Internal server error"))


if __name__ == "__main__":
    sys.exit(main())
