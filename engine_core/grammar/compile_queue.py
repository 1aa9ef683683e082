"""The queue of requests whose grammar is being compiled. From here they go to the scheduler.

Nothing of llguidance is imported before the first of them comes.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from engine_core.grammar.matcher import GrammarError, TokenMatcher
from engine_core.protocol import AddRequest, Failed, Grammar, Spelling

if TYPE_CHECKING:
    from engine_core.grammar.compiler import GrammarCompiler, Outcome
    from engine_core.grammar.grammar_threads import GrammarJob

Key = tuple[int, int]
"""The number of a client, and the id of one of its requests."""

_MOST_WAITING = 0.05
"""The seconds after which one who waits looks whether a grammar takes too long."""
MOST_BY_OWNER = 64
"""The requests of one owner that wait for grammars, or compile them, at most."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class QueuedRequest:
    client: int
    request: AddRequest
    grammar: Grammar
    compiler: GrammarCompiler
    compiled: GrammarJob[Outcome]
    paused: bool = False
    """Whether nothing shall be computed for it yet."""

    @property
    def deadline(self) -> float | None:
        """When it has been compiled for as long as it may be, if that has begun."""
        from engine_core.grammar.compiler import COMPILE_SECONDS

        return None if self.compiled.started is None else self.compiled.started + COMPILE_SECONDS

    def is_settled(self, now: float) -> bool:
        """Whether it is compiled, or takes too long."""
        return self.compiled.done() or ((deadline := self.deadline) is not None and now > deadline)

    def outcome(self) -> TokenMatcher | Failed:
        """The matcher of its answer, or the answer to a request whose grammar cannot be followed."""
        from engine_core.grammar.compiler import took_too_long

        try:
            if not self.compiled.done():
                self.compiler.abandon(self.grammar, self.compiled)
                raise took_too_long()
            return self.compiler.matcher(self.compiled.outcome(), self.grammar, self.request.owner)
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

    def add(self, client: int, request: AddRequest, grammar: Grammar) -> None:
        """Take a request in. `leave` returns it when its grammar is compiled."""
        compiler = self._compiler
        if compiler is None:
            raise ValueError("a request with a grammar came before the spelling of tokens")
        compiled = compiler.compile(grammar, request.owner)
        self._requests[client, request.id] = QueuedRequest(client, request, grammar, compiler, compiled)

    def refusal(self, request: AddRequest) -> Failed | None:
        """Why another grammar of this owner cannot be taken in now."""
        owner = request.owner
        queued = sum(each.request.owner == owner for each in self._requests.values())
        if queued >= MOST_BY_OWNER:
            return Failed(request.id, 503, f"{queued} grammars of yours wait already: try again later")
        if self._compiler is not None and self._compiler.refuses(owner):
            return Failed(request.id, 503, "grammars of yours took too long and still run: try again later")
        return None

    def leave(self) -> list[QueuedRequest]:
        """Return the requests whose grammar is compiled or took too long, which are not here any more."""
        self._done.silence()
        now = time.monotonic()
        keys = [key for key, queued in self._requests.items() if queued.is_settled(now)]
        return [self._requests.pop(key) for key in keys]

    @property
    def next_deadline(self) -> float | None:
        """The time by which `leave` must be called, though nothing is compiled."""
        deadlines = [queued.deadline for queued in self._requests.values()]
        return min((at for at in deadlines if at is not None), default=None)

    def discard(self, keys: Iterable[Key]) -> list[Key]:
        """Let requests go that nobody waits for any more, with their work; returns those that were here."""
        found = [key for key in keys if key in self._requests]
        for queued in [self._requests.pop(key) for key in found]:
            if all(other.compiled is not queued.compiled for other in self._requests.values()):
                queued.compiler.abandon(queued.grammar, queued.compiled)
        return found

    def keys(self) -> list[Key]:
        """The requests that are here."""
        return list(self._requests)

    def set_paused(self, keys: Iterable[Key], *, paused: bool) -> None:
        for key in keys:
            if key in self._requests:
                self._requests[key].paused = paused

    def wait(self) -> None:
        """Wait until a grammar is compiled, or takes too long."""
        self._done.silence()
        while not any(queued.is_settled(time.monotonic()) for queued in self._requests.values()):
            self._done.wait(_MOST_WAITING)
            self._done.silence()

    def heed(self) -> None:
        """Let polls wait again. Call this before late matchers are looked at."""
        self._done.silence()

    def register(self, poller: zmq.Poller) -> None:
        """Let polls wake when a grammar is compiled, or a matcher is late no more."""
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
        self._rung = threading.Event()
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

    def wait(self, seconds: float) -> None:
        self._rung.wait(seconds)

    def ring(self) -> None:
        self._rung.set()
        if self._ends is not None:
            with suppress(OSError):  # full, so that it can be read already; or closed
                self._ends[1].send(b"\0")

    def silence(self) -> None:
        """Call this before looking, so that what is done afterwards can be read."""
        if not self._rung.is_set():
            return
        self._rung.clear()
        if self._ends is not None:
            with suppress(BlockingIOError):
                self._ends[0].recv(4096)

    def close(self) -> None:
        if self._ends is not None:
            for end in self._ends:
                end.close()
