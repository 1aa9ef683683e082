"""Random requests to engines that end at random moments: each result is compared with the one it has alone.

The dispatcher is the real one and so are the engines, in this process and without sockets. A run is made from
its number alone, so one that shows a difference can be made again by itself.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from random import Random

from bits_schedule import PLAINEST, Limits, Tally, count_floats, difference, open_engine, options_of
from bits_subjects import decoder
from bits_traffic import Result, Turn, write_traffic

from engine_core.client.dispatcher import Dispatcher
from engine_core.client.in_flight import InFlight, Stream
from engine_core.client.replica_routing import ReplicaTable
from engine_core.config import Replicas
from engine_core.engine import Engine
from engine_core.protocol import Abort, AddRequest, AddRequests, Request
from worker.protocol import Sampling

SUBJECTS = (
    decoder("LlamaForCausalLM", "float32", "LAST"),
    decoder("Qwen3ForCausalLM", "bfloat16", "LAST"),
    decoder("LlamaForCausalLM", "bfloat16", "LAST", "int8"),
    decoder("Qwen3_5ForCausalLM", "float32", "LAST"),
    decoder("Gemma2ForCausalLM", "float32", "LAST"),
    decoder("LlamaForCausalLM", "bfloat16", "LAST"),
    decoder("Qwen3ForCausalLM", "float32", "LAST"),
)


class LosableEngines:
    """Engines, one for each replica, that a client's dispatcher uses and that may end between two steps."""

    def __init__(self, open_one: Callable[[], AbstractContextManager[Engine]], size: int) -> None:
        """`open_one` opens an engine, also in the place of one that has ended."""
        self._open_one = open_one
        self._table = ReplicaTable(Replicas(size=size, here=size), servers=1)
        self._engines: dict[int, Engine] = {}
        self._opened = {number: ExitStack() for number in range(size)}
        self.dispatcher = Dispatcher(self._table, self._send, restart_wait=1e6)
        for number in range(size):
            self.start(number)

    @property
    def numbers(self) -> list[int]:
        """The replicas that work."""
        return list(self._engines)

    @property
    def missing(self) -> list[int]:
        return [number for number in self._table.replicas if number not in self._engines]

    def start(self, number: int) -> None:
        replica = self._table.replicas[number]
        engine = self._engines[number] = self._opened[number].enter_context(self._open_one())
        replica.reset()
        replica.reachable = replica.connected = True
        assert self._table.set_ready(replica, engine.ready) is None
        self._table.refresh()
        self.dispatcher.dispatch_held()

    def step(self, number: int, most: int = 1 << 30) -> None:
        """Make a step of one engine, of whose outputs the last ones are lost if it gives more than `most`."""
        for output in self._engines[number].step().get(0, [])[:most]:
            self.dispatcher.deliver(self._table.replicas[number], output)

    def end(self, number: int) -> None:
        """End an engine: whatever it holds is lost."""
        del self._engines[number]
        self._opened[number].close()
        replica = self._table.replicas[number]
        self._table.lose(replica, "it was ended")
        self._table.refresh()
        self.dispatcher.hand_over(replica, None)

    def close(self) -> None:
        for opened in self._opened.values():
            opened.close()

    def _send(self, number: int, request: Request) -> None:
        match request:
            case AddRequest():
                self._engines[number].add(0, request)
            case AddRequests(adds):
                for add in adds:
                    self._engines[number].add(0, add)
            case Abort(ids):
                self._engines[number].abort(0, ids)
            case _:
                raise ValueError(f"no engine of this test knows {request}")


class CutProver:
    """Runs requests whose engines end, and compares every result with the truth."""

    def __init__(self, folder: Path, requests: int) -> None:
        """`folder`: where checkpoints are written; each run has so many requests."""
        self._folder = folder
        self._requests = requests
        self.tally = Tally()
        self.resumed = 0
        """Answers that went on in another engine."""
        self.ends = 0

    async def run(self, number: int) -> None:
        subject = SUBJECTS[number % len(SUBJECTS)]
        random = Random(f"lost engines {number}")
        with open_engine(self._folder, subject, PLAINEST) as engine:
            traffic = write_traffic(random, subject, self._requests, engine)
        turns = [turn for conversation in traffic for turn in conversation][: self._requests]
        limits = Limits.draw(random, subject, max(turn.most_tokens for turn in turns))
        size = random.choice((1, 2))
        engines = LosableEngines(lambda: open_engine(self._folder, subject, limits), size)
        with closing(engines):
            await self._compare(random, engines, turns, f"run {number}: {subject}, {limits}")

    async def _compare(self, random: Random, engines: LosableEngines, turns: list[Turn], where: str) -> None:
        sent = self._send_and_cut(random, engines, turns)
        for turn, one in zip(turns, sent, strict=True):
            result = Result()
            async for answer in one.stream:
                result.take(answer)
            self.tally.results += 1
            self.tally.floats += count_floats(turn, result)
            self.resumed += bool(one.add.prompt_len)
            if words := difference(turn, result, aborted=False):
                self.tally.differences.append(f"{where}, {options_of(turn.params)}: {words}")

    def _send_and_cut(self, random: Random, engines: LosableEngines, turns: list[Turn]) -> list[InFlight]:
        sent: list[InFlight] = []
        until_end = random.choice((5, 20, 60))
        while len(sent) < len(turns) or len(engines.dispatcher):
            while len(sent) < len(turns) and random.random() < 0.5:
                turn, id = turns[len(sent)], len(sent)
                stream = Stream(id, asyncio.get_running_loop(), pools=not isinstance(turn.params, Sampling))
                sent.append(InFlight(AddRequest(id, turn.prompt, turn.params), stream))
                engines.dispatcher.dispatch(sent[-1:])
            for number in engines.missing:
                if random.random() < 0.5:
                    engines.start(number)
            for number in engines.numbers:
                if random.random() < 1 / until_end:
                    self.ends += 1
                    engines.step(number, most=random.randrange(4))
                    engines.end(number)
                    until_end += 2  # so that it ends at last
                else:
                    engines.step(number)
        return sent
