"""A disk for schedulers: blocks of a fake worker's cache, which come, go and get lost when a test says so."""

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial

from fake_cache import FakeCache
from fake_states import FakeStates
from scheduler_bench import Bench

from engine_core.features.cache_tiers.stored_prefixes import StoredPrefixes
from engine_core.features.states.prefix_states import PrefixStates
from engine_core.grammar.matcher import TokenMatcher
from engine_core.protocol import AddRequest
from engine_core.scheduling.sequence import Place
from worker.cache_tiers.block_read import BlockRead, ReadPace
from worker.protocol import DiskTotals

Entries = list[int | None]

_STEP = 0.01
"""The seconds of a step, which are fewer than those for which a disk is awaited."""


class ScriptedDisk:
    block_bytes = 1
    write_seconds = 0.0

    def __init__(self, most: int = 3, room: int | None = None) -> None:
        """`room`: the blocks that it holds, if it is memory."""
        self.most, self.room = most, room
        self.kept: dict[bytes, Entries] = {}
        self.damaged: set[bytes] = set()
        """Names of blocks that are lost when they are read."""
        self.pace = ReadPace()
        self.cache: FakeCache | FakeStates | None = None
        self.states: ScriptedDisk | None = None
        """The disk of states, if the engine has some."""
        self._writing: dict[bytes, Entries] = {}
        self._reads: deque[BlockRead] = deque()
        self.read_blocks = 0

    def serve(self, cache: FakeCache | FakeStates, states: FakeStates | None = None) -> None:
        """Work for a new engine; what was under way for another one is lost."""
        self.cache, self._writing = cache, {}
        self._reads.clear()
        if states is not None:
            self.states = self.states or ScriptedDisk(most=1, room=self.room)
            self.states.serve(states)

    def __contains__(self, name: bytes) -> bool:
        return name in self.kept

    @property
    def may_write(self) -> bool:
        return not self._writing

    @property
    def totals(self) -> DiskTotals:
        return DiskTotals(len(self.kept), 0, self.read_blocks, 0, 0, 0)

    def rest(self, seconds: float) -> bool:
        self.finish_write()
        return True

    def write(self, names: list[bytes], blocks: list[int]) -> None:
        assert self.may_write and len(names) <= self.most
        assert self.cache is not None
        found = {name: self.cache.block(block) for name, block in zip(names, blocks, strict=True)}
        self._writing = {name: entries for name, entries in found.items() if entries is not None}

    def finish_write(self, *, lose: bool = False) -> None:
        if not lose:
            self.kept |= self._writing
            while self.room is not None and len(self.kept) > self.room:
                del self.kept[next(iter(self.kept))]
        self._writing = {}
        if self.states is not None:
            self.states.finish_write(lose=lose)

    def look(self) -> None: ...

    def forget_all(self) -> None:
        self.kept.clear()
        self._writing = {}

    def read(self, read: BlockRead) -> None:
        assert not any(None in self.kept[name] for name in read.names), "only full blocks are written"
        self._reads.append(read)

    def read_one(self) -> None:
        """Read one block of the first read that has one, and one state."""
        if self.states is not None:
            self.states.read_one()
        while self._reads:
            read = self._reads[0]
            if (index := read.take()) is None:
                self._reads.popleft()
                continue
            name, block = read.names[index], read.blocks[index]
            entries = None if name in self.damaged else self.kept.get(name)
            read.land(index, None if entries is None else partial(self._bring, block, entries))
            return

    def end(self, read: BlockRead, now: float) -> None:
        read.give_up()
        self.read_blocks += sum(read.loaded)

    def wait_for(self, read: BlockRead, seconds: float) -> None: ...

    def _bring(self, block: int, entries: Entries) -> None:
        assert self.cache is not None
        self.cache.put(block, entries)


@dataclass
class DiskBench(Bench):
    """A bench with a disk, whose threads run when it is told."""

    scripted: ScriptedDisk = field(default_factory=ScriptedDisk)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scripted.serve(self.worker.cache, self.worker.states)
        hooks = self.scheduler.hooks
        states = hooks.find(PrefixStates)
        self.states = None if states is None else states.pool
        self.prefixes = StoredPrefixes(self.scheduler, self.scripted, self.states)
        hooks.install((self.prefixes, *hooks.features))

    def add(self, request: AddRequest, client: int = 0, matcher: TokenMatcher | None = None) -> None:
        self.now += _STEP - 1
        super().add(request, client, matcher)

    def step(self) -> bool:
        self.now += _STEP - 1
        self.prefixes.poll(self.now + 1, len(self.in_flight))
        return super().step()

    def settle(self) -> None:
        """Have all published blocks written."""
        while self.prefixes.write_rest(self.now, self.now):
            pass

    def run(self) -> None:
        """Run all that there are, with a disk that answers."""
        while self.scheduler.live or self.in_flight:
            self.scripted.read_one()
            if self.scripted.room is not None:
                self.scripted.finish_write()
            self.step()
        self.check()

    def check(self) -> None:
        scheduler, scratch = self.scheduler, self.facts.num_blocks
        returns = self.prefixes._returns  # pyright: ignore[reportPrivateUsage]
        tables = [table for seq in scheduler.running for table in seq.tables]
        tables += [each.blocks for each in returns]
        users = Counter(block for table in tables for block in table if block != scratch)
        assert all(scheduler.cache.pool.users(block) == users[block] for block in range(scratch))
        assert scheduler.cache.pool.free == scratch - len(users)
        if (states := self.states) is not None:
            coming = sum(each.state is not None for each in returns)
            writing = sum(len(row.kept) for planned, _ in self.in_flight for row in planned.step.seqs)
            assert len(states) + states.free + coming + writing == self.facts.remembered_states
        parked = [seq for seq in scheduler.paused if seq.place is Place.WAITING]
        fetching = [each for each in returns if not each.seq.done]
        counts = len(scheduler.running), scheduler.waiting.count, len(parked), len(fetching)
        assert len(scheduler.live) == sum(counts)
