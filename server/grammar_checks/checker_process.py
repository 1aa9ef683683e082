"""The process that compiles clients' grammars first: `python -m server.grammar_checks.checker_process FD`."""

from __future__ import annotations

import importlib
import logging
import resource
import socket
import sys
from collections.abc import Mapping

import msgspec

from server.errors import ApiError, BadRequest, Internal
from server.grammar_checks.tool_calls import AskedCalls, build_call_grammar
from server.grammars.form_grammar import AnswerGrammar, build_grammar
from server.grammars.structured_params import AskedForm
from server.offload.memory_limits import give_back, resident, set_most_memory
from server.offload.messages import NO_MEMORY, SentError, frame, receive_frame, sent_error
from worker import child, logs

MUCH, TOO_MUCH = 16 << 20, 128 << 20
"""Bytes left behind by grammars: so many are given back to the system; with so many the process ends."""

_log = logging.getLogger(__name__)

Question = AskedForm | AskedCalls
Verdict = AnswerGrammar | SentError


class CheckerSetup(msgspec.Struct, frozen=True):
    """What the process is started with."""

    socket: int
    """The inherited descriptor of its end of the connection."""
    tokens: dict[str, int]
    """The ids of special tokens."""
    memory: int
    """Bytes of address space beyond those that it has when it waits."""
    log_level: str


def main() -> int:
    setup = msgspec.msgpack.decode(child.adopt(int(sys.argv[1])), type=CheckerSetup)
    logs.setup("grammar checker", setup.log_level)
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
        verdict = check(msgspec.msgpack.decode(data, type=Question), tokens)
        connection.sendall(frame(msgspec.msgpack.encode(verdict)))
        if resident() > at_rest + MUCH:
            give_back()
        if resident() > at_rest + TOO_MUCH:
            return


def check(asked: Question, tokens: Mapping[str, int]) -> Verdict:
    """The grammar of what is asked, if it can be compiled."""
    try:
        return build_call_grammar(asked) if isinstance(asked, AskedCalls) else build_grammar(asked, tokens)
    except ApiError as error:
        return sent_error(error)
    except MemoryError:
        return sent_error(BadRequest(NO_MEMORY, asked.field))
    except Exception:
        _log.exception("a grammar could not be read")
        return sent_error(Internal("Internal server error"))


if __name__ == "__main__":
    sys.exit(main())
