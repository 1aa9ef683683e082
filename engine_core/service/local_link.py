"""Carries messages between a client and an engine in the same process: each is a call, in one thread."""

from __future__ import annotations

from collections.abc import Callable

from engine_core import protocol
from engine_core.engine import Engine
from engine_core.service.message_handler import MessageHandler
from engine_core.wire.transport import Listener

_CLIENT = 0


class LocalLink:
    """Whoever has it must call `step` while the engine is `busy`; all calls come from one thread."""

    def __init__(self, engine: Engine, number: int) -> None:
        """`number` is that of the engine among replicas."""
        self.engine = engine
        self.on_send: Callable[[], None] = lambda: None
        """Called when the engine has been sent something."""
        self._number = number
        self._listener: Listener | None = None
        self._handler = MessageHandler(engine, lambda _, answer: self._tell(answer), self._tell, self._drain)

    def open(self, listener: Listener) -> None:
        self._listener = listener
        hello = protocol.Hello(engine=self._number, protocol=protocol.PROTOCOL)
        listener.connected(hello)
        listener.reachable(hello)
        for answer in self._handler.greeting():
            self._tell(answer)

    def send(self, number: int, request: protocol.Request) -> None:
        self._handler.handle(_CLIENT, request)
        self.on_send()

    def read(self) -> None:
        """Does nothing: answers are heard when they are told."""

    def close(self) -> None:
        """Let nobody hear anything any more."""
        self._listener = None

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return self.engine.busy or bool(self._handler.sleep_orders)

    def step(self) -> None:
        """Run one step of the engine, wait for it, and tell what comes of it."""
        if outputs := self.engine.step().get(_CLIENT):
            self._tell(protocol.Outputs(outputs=outputs))
        self._handler.tell()
        self._handler.obey()

    def tell_stats(self) -> None:
        """Tell what an engine in a process of its own tells beside its outputs."""
        self._tell(self.engine.stats())

    def _tell(self, answer: protocol.Answer) -> None:
        if self._listener is not None:
            self._listener.heard(self._number, answer)

    def _drain(self, seconds: float) -> None:
        self.engine.drain()
