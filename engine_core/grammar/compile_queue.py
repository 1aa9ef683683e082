"""The queue of requests whose grammar is being compiled. From here they go to the scheduler.

Nothing of llguidance is imported before the first of them comes.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from engine_core.grammar.matcher import GrammarError, TokenMatcher
from engine_core.protocol import Add, Failed, Grammar, Spelling

if TYPE_CHECKING:
    from engine_core.grammar.compiler import Compiled, GrammarCompiler

Key = tuple[int, int]
"""The number of a client, and the id of one of its requests."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class QueuedRequest:
    client: int
    request: Add
    grammar: Grammar
    compiler: GrammarCompiler
    compiled: Future[Compiled]
    paused: bool = False
    """Whether nothing shall be computed for it yet."""

    def outcome(self) -> TokenMatcher | Failed:
        """The matcher of its answer, or the answer to a request whose grammar cannot be followed."""
        try:
            return self.compiler.matcher(self.compiled.result(), self.grammar)
        except GrammarError as error:
            return Failed(id=self.request.id, code=400, message=str(error))
        except Exception:
            _log.exception("a grammar could not be prepared")
            broke = "the grammar of this request could not be prepared"
            return Failed(id=self.request.id, code=500, message=broke)


class CompileQueue:
    def __init__(self, vocab_size: int, folder: str) -> None:
        """`folder` is the checkpoint's on this machine."""
        self._vocab_size = vocab_size
        self._folder = folder
        self._spelling: Spelling | None = None
        self._compiler: GrammarCompiler | None = None
        self._requests: dict[Key, QueuedRequest] = {}
        self._done = _Bell()

    def __len__(self) -> int:
        """The number of requests here."""
        return len(self._requests)

    def __contains__(self, key: Key) -> bool:
        return key in self._requests

    def spell(self, spelling: Spelling) -> None:
        """Learn how tokens are spelled, before the first request. All servers of a model say the same."""
        if spelling == self._spelling:
            return
        # With the first constrained request and not before: most engines never get one.
        from engine_core.grammar.compiler import GrammarCompiler

        if self._compiler is not None:
            self._compiler.stop()
        self._spelling = spelling
        self._compiler = GrammarCompiler(spelling, self._vocab_size, self._folder, self._done.ring)

    def add(self, client: int, request: Add, grammar: Grammar) -> None:
        """Take a request in. `leave` returns it when its grammar is compiled."""
        compiler = self._compiler
        if compiler is None:
            raise ValueError("a request with a grammar came before the spelling of tokens")
        compiled = compiler.compile(grammar)
        self._requests[client, request.id] = QueuedRequest(client, request, grammar, compiler, compiled)

    def leave(self) -> list[QueuedRequest]:
        """Return the requests whose grammar is compiled, which are not here any more."""
        self._done.silence()
        keys = [key for key, queued in self._requests.items() if queued.compiled.done()]
        return [self._requests.pop(key) for key in keys]

    def discard(self, keys: Iterable[Key]) -> list[Key]:
        """Let requests go that nobody waits for any more; returns those that were here."""
        return [key for key in keys if self._requests.pop(key, None) is not None]

    def keys(self) -> list[Key]:
        """The requests that are here."""
        return list(self._requests)

    def set_paused(self, keys: Iterable[Key], *, paused: bool) -> None:
        for key in keys:
            if key in self._requests:
                self._requests[key].paused = paused

    def wait(self) -> None:
        """Wait until a grammar is compiled."""
        wait([queued.compiled for queued in self._requests.values()], return_when=FIRST_COMPLETED)

    def register(self, poller: zmq.Poller) -> None:
        """Let polls wake when a grammar is compiled."""
        self._done.register(poller)

    def stop(self) -> None:
        if self._compiler is not None:
            self._compiler.stop()
        self._done.close()


class _Bell:
    """A descriptor that can be read when a grammar has been compiled since the last look.

    It is made when somebody registers, and rung from another thread.
    """

    def __init__(self) -> None:
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._poller: zmq.Poller | None = None

    def register(self, poller: zmq.Poller) -> None:
        if self._ends is None:
            self._ends = socket.socketpair()
            for end in self._ends:
                end.setblocking(False)
        if self._poller is not poller:  # another one follows a sleep
            self._poller = poller
            poller.register(self._ends[0], zmq.POLLIN)
            self.ring()  # a grammar may be compiled already

    def ring(self) -> None:
        if self._ends is not None:
            with suppress(OSError):  # full, so that it can be read already; or closed
                self._ends[1].send(b"\0")

    def silence(self) -> None:
        """Call this before looking, so that what is done afterwards can be read."""
        if self._ends is not None:
            with suppress(BlockingIOError):
                self._ends[0].recv(4096)

    def close(self) -> None:
        if self._ends is not None:
            for end in self._ends:
                end.close()
