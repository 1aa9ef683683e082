"""An API server's view of its engine: submit a request, read its stream, know whether the engine lives.

Runs in one event loop and reads the sockets from that loop's own poll: no task, lock or queue per token.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

from engine_core.config import Address
from engine_core.protocol import (
    PROTOCOL,
    Abort,
    Add,
    AddMany,
    Answer,
    Dead,
    Drain,
    Failed,
    Hello,
    Outputs,
    Pooled,
    Progress,
    Ready,
    Request,
    ResetPrefixCache,
    Stats,
    Tokens,
)
from engine_core.transport import RequestTooLarge, ServerEnd, Unreachable
from worker.protocol import Pooling, Sampling

_TOKENS_IN_FRAME = 1 << 17
"""Of several requests together: the engine begins with the first of them while the others are written."""

_ABORTED = "the request was ended before it was done"

Answers = TypeVar("Answers", Tokens, Pooled)


class Stream(AsyncIterator[Answers | Failed], Generic[Answers]):
    """The answers to one request, the last of which is terminal. For one reader."""

    __slots__ = ("_loop", "_outputs", "_over", "_waiter", "id", "pools")

    def __init__(self, id: int, loop: asyncio.AbstractEventLoop, *, pools: bool = False) -> None:
        self.id = id
        self.pools = pools
        self._loop = loop
        self._outputs: list[Answers | Failed] = []
        self._waiter: asyncio.Future[None] | None = None
        self._over = False

    def put(self, output: Answers | Failed) -> None:
        self._outputs.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Answers | Failed:
        """All that has come since the last call, as one; waits if nothing has."""
        if not self._outputs:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        outputs, self._outputs = self._outputs, []
        if len(outputs) > 1 and isinstance(outputs[-1], Failed):
            self._outputs = [outputs.pop()]  # what came before the failure is delivered first
        if len(outputs) == 1:
            return outputs[0]
        merged = _merge([output for output in outputs if isinstance(output, Tokens)])
        return cast("Answers", merged)  # nothing but tokens comes in several parts

    async def __anext__(self) -> Answers | Failed:
        if self._over:
            raise StopAsyncIteration
        output = await self.get()
        self._over = is_terminal(output)
        return output


class EngineClient:
    """Create it in the event loop that will use it.

    `located` is set once `progress.folder` is known, `settled` once the engine is ready or dead, `died` once
    it is dead. A dead engine sets all three.
    """

    def __init__(
        self, address: Address, engine: int = 0, on_progress: Callable[[Progress], None] | None = None
    ) -> None:
        self.progress = Progress(stage="start", fraction=0.0)
        self.ready: Ready | None = None
        self.dead: str | None = None
        """Why, if it is dead."""
        self.stats: Stats | None = None
        self.located = asyncio.Event()
        self.settled = asyncio.Event()
        self.died = asyncio.Event()
        self._engine = engine
        self._on_progress = on_progress
        self._greeted = False
        self._streams: dict[int, Stream[Any]] = {}
        # Not from 0: answers meant for a server that crashed must not fit requests of the one in its place.
        self._last_id = secrets.randbits(48)
        self._loop = asyncio.get_running_loop()
        self._end = ServerEnd(address)
        self._readers = {
            self._end.hellos.sock.FD: self._read_hellos,
            self._end.answers.sock.FD: self._read_answers,
            self._end.monitor.FD: self._read_monitor,
        }
        for descriptor, read in self._readers.items():
            self._loop.add_reader(descriptor, read)
            read()  # a descriptor of ZMQ tells of what comes after the socket was found empty

    def submit(
        self, tokens: list[int], params: Sampling, *, priority: int = 0, salt: str = ""
    ) -> Stream[Tokens]:
        """Send a request. Whatever happens, the stream ends with exactly one terminal answer."""
        add = self._add(tokens, params, priority, salt)
        stream: Stream[Tokens] = Stream(add.id, self._loop)
        self._open(add, [stream])
        return stream

    def submit_many(
        self, requests: Iterable[tuple[list[int], Pooling]], *, priority: int = 0, salt: str = ""
    ) -> list[Stream[Pooled]]:
        """Send many requests for vectors, in few frames. Each stream has one answer."""
        adds = [self._add(tokens, params, priority, salt) for tokens, params in requests]
        streams = [Stream[Pooled](add.id, self._loop, pools=True) for add in adds]
        start = 0
        for stop in _frames(adds):
            self._open(AddMany(adds[start:stop]), streams[start:stop])
            start = stop
        return streams

    def abort(self, ids: Iterable[int]) -> None:
        """End these requests: with finish "abort", or Failed. Those that have ended are passed over."""
        live = [id for id in ids if id in self._streams]
        for id in live:
            stream = self._streams.pop(id)
            aborted = Tokens(id=id, tokens=[], finish="abort")
            stream.put(Failed(id=id, code=503, message=_ABORTED) if stream.pools else aborted)
        if live and self.dead is None:
            self._tell(Abort(ids=live))

    def drain(self, seconds: float) -> None:
        """Let the engine finish what it has, within that time, and end."""
        self._tell(Drain(seconds=seconds))

    def reset_prefix_cache(self) -> None:
        self._tell(ResetPrefixCache())

    def fail(self, reason: str) -> None:
        """The engine is dead: every open stream ends. The first reason counts."""
        if self.dead is not None:
            return
        self.dead = reason
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(Failed(id=stream.id, code=503, message=reason))
        for event in (self.located, self.settled, self.died):
            event.set()

    def close(self) -> None:
        self.fail("the server has stopped")
        for descriptor in self._readers:
            self._loop.remove_reader(descriptor)
        self._readers.clear()
        self._end.close()

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def _add(self, tokens: list[int], params: Sampling | Pooling, priority: int, salt: str) -> Add:
        self._last_id += 1
        return Add(id=self._last_id, tokens=tokens, params=params, priority=priority, salt=salt)

    def _open(self, request: Add | AddMany, streams: Sequence[Stream[Any]]) -> None:
        """Send what these streams are the answers to."""
        code, message = 503, self.dead
        if message is None:
            try:
                self._send(request)
            except RequestTooLarge as error:
                code, message = 400, str(error)
            except Unreachable as error:
                message = str(error)
        for stream in streams:
            if message is None:
                self._streams[stream.id] = stream
            else:
                stream.put(Failed(id=stream.id, code=code, message=message))

    def _send(self, request: Request) -> None:
        self._end.send(self._engine, request)
        self._read_hellos()  # sending may swallow the socket's one notice that something can be read

    def _tell(self, request: Request) -> None:
        """Send what needs no answer: an engine that cannot be reached has nothing to do either."""
        try:
            self._send(request)
        except Unreachable:
            return

    def _read_hellos(self) -> None:
        for hello in self._end.hellos.read():
            if not isinstance(hello, Hello):
                continue
            if hello.protocol != PROTOCOL:
                self.fail("the engine is of another version than this server: restart all of them")
            self._greeted = True
            self._settle()

    def _read_answers(self) -> None:
        for answer in self._end.answers.read():
            self._receive(answer)

    def _read_monitor(self) -> None:
        if self._end.engine_left():
            self._read_answers()  # its last words came before its end
            self.fail("the engine process has ended")

    def _receive(self, answer: Answer) -> None:
        match answer:
            case Outputs(outputs, stats):
                for output in outputs:
                    self._deliver(output)
                self.stats = stats or self.stats
            case Stats():
                self.stats = answer
            case Progress(folder=folder):
                self.progress = answer
                if folder:
                    self.located.set()
                if self._on_progress is not None:
                    self._on_progress(answer)
            case Ready():
                self.ready = answer
                self._settle()
            case Dead(reason):
                self.fail(reason)
            case Hello():
                pass  # comes through the other socket

    def _deliver(self, output: Tokens | Pooled | Failed) -> None:
        stream = self._streams.get(output.id)
        if stream is None:
            return  # aborted here a moment ago
        if is_terminal(output):
            del self._streams[output.id]
        stream.put(output)

    def _settle(self) -> None:
        """Ready means that the engine works and that the way to it is known: two messages, two sockets."""
        if self._greeted and self.ready is not None:
            self.settled.set()


def is_terminal(output: Tokens | Pooled | Failed) -> bool:
    return not isinstance(output, Tokens) or output.finish is not None


def _frames(adds: list[Add]) -> Iterator[int]:
    """Where each frame ends. A single request may be larger than what several may be together."""
    tokens = 0
    for index, add in enumerate(adds):
        if tokens and tokens + len(add.tokens) > _TOKENS_IN_FRAME:
            yield index
            tokens = 0
        tokens += len(add.tokens)
    if adds:
        yield len(adds)


def _merge(parts: list[Tokens]) -> Tokens:
    first, last = parts[0], parts[-1]
    return Tokens(
        id=first.id,
        tokens=[token for part in parts for token in part.tokens],
        logprobs=[entry for part in parts for entry in part.logprobs],
        prompt_logprobs=first.prompt_logprobs,
        cached=first.cached,
        finish=last.finish,
        timing=last.timing,
    )
