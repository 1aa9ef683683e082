"""The cache of a worker without tensors: entries depend on all tokens before; blocks belong to groups."""

from collections.abc import Iterable

from fake_states import ROOT, mix

from worker.protocol import SeqStep
from worker.worker_facts import WorkerFacts


def entries_of(tokens: Iterable[int]) -> list[int | None]:
    """The entries that these tokens should have in the first group; in another one its number is added."""
    entries: list[int | None] = []
    entry = ROOT
    for token in tokens:
        entry = mix(entry, token)
        entries.append(entry)
    return entries


def sum_up(entries: list[int | None]) -> int:
    """A number that depends on all entries and on their places."""
    total = 0
    for index, entry in enumerate(entries):
        if entry is None:
            raise ValueError("a cache entry was read before it was written")
        total += entry * (index + 1)
    return total % 49999


class FakeCache:
    def __init__(self, facts: WorkerFacts) -> None:
        self._size, self._scratch, self._windows = facts.block_size, facts.num_blocks, facts.windows
        self._entries: list[int | None] = [None] * ((facts.num_blocks + 1) * facts.block_size)
        self._tables: dict[int, list[list[int]]] = {}
        self._shifts: dict[int, tuple[int, int]] = {}
        """slot -> what its adapter adds to each token, and from which position on."""

    def begin(self, slot: int, shift: int = 0, shift_from: int = 0) -> None:
        self._tables[slot] = [[] for _ in self._windows]
        self._shifts[slot] = shift, shift_from

    def has_room(self, slot: int, positions: int) -> bool:
        return len(self._tables[slot][0]) * self._size >= positions

    def entry(self, slot: int, position: int, group: int = 0) -> int | None:
        return self._entries[self._place(slot, position, group)]

    def block(self, block: int) -> list[int | None]:
        """The entries of a block."""
        return self._entries[block * self._size : (block + 1) * self._size]

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        copies = [(target, self.block(source)) for source, target in pairs]
        for target, entries in copies:
            self.put(target, entries)

    def put(self, block: int, entries: list[int | None]) -> None:
        self._entries[block * self._size : (block + 1) * self._size] = entries

    def write(self, seq: SeqStep, tokens: list[int]) -> None:
        """Write the entries of a row, in all groups."""
        tables = self._tables[seq.slot]
        each = len(seq.blocks) // len(tables)
        for group, table in enumerate(tables):
            table += seq.blocks[group * each : (group + 1) * each]
        if len(tables[0]) * self._size < seq.start + seq.count:
            raise ValueError("the row has too few blocks")
        for position in range(seq.start, seq.start + seq.count):
            shift, since = self._shifts.get(seq.slot, (0, 0))
            token = tokens[position] + (shift if position >= since else 0)
            entry = mix(self.entry(seq.slot, position - 1) if position else ROOT, token)
            for group, table in enumerate(tables):
                if table[position // self._size] == self._scratch:
                    raise ValueError("an entry would be written to the scratch block")
                self._entries[self._place(seq.slot, position, group)] = entry + group

    def seen(self, seq: SeqStep, tokens: list[int]) -> list[int | None]:
        """The entries of the first group up to the end of a row; what they were if it has a window."""
        end = seq.start + seq.count
        if self._windows[0]:
            return entries_of(tokens[:end])
        return [self.entry(seq.slot, position) for position in range(end)]

    def check(self, seq: SeqStep, tokens: list[int]) -> None:
        """Assert that queries find what they read, unless all layers read all: then texts show it."""
        if self._windows == (0,):
            return
        end = seq.start + seq.count
        expected = entries_of(tokens[:end])
        for group, window in enumerate(self._windows):
            for position in range(max(0, seq.start - window + 1) if window else 0, end):
                if self.entry(seq.slot, position, group) != (expected[position] or 0) + group:
                    raise ValueError(f"group {group} does not have the entry of position {position}")

    def _place(self, slot: int, position: int, group: int) -> int:
        return self._tables[slot][group][position // self._size] * self._size + position % self._size
