"""Remembered states: what a hybrid's layers keep of a sequence, behind some of its blocks.

A cached prefix of such a model ends where both are there: all its blocks, and the state behind the last one.
A state takes as much memory as a thousand tokens or more. So there are few places: they are filled where
prompts are likely to go on, and the least recently used state gives way. A state is named by the hash of the
block behind which it stands, which stands for all tokens before.

A place may be read in one step and written in the next, because steps run in their order; but the rows of a
step run at the same time, so a place that one of them reads is not given to another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from engine_core.scheduling.sequence import Sequence
from models.state_rows import MOST_KEPT
from worker.protocol import Sampling, SeqStep


class StepStates(NamedTuple):
    """What a row of a step does with states, as `SeqStep` has it."""

    source: int = -1
    kept: tuple[tuple[int, int], ...] = ()


NO_STATES = StepStates()


@dataclass(slots=True)
class _Own:
    """What is noted of a sequence that runs."""

    source: int = -1
    """The place of the remembered state from which its next step goes on, if it does."""
    ends: list[int] = field(default_factory=list[int])
    """The numbers of leading tokens after which its state is to be remembered."""


class States:
    def __init__(self, count: int, block_size: int) -> None:
        self._block_size = block_size
        self._free = list(reversed(range(count)))
        self._by_hash: OrderedDict[bytes, int] = OrderedDict()
        """Places of remembered states, the least recently used first."""
        self.published: dict[bytes, None] | None = None
        """Gets the name of each state that others can find, if somebody wants to know."""
        self._own: dict[Sequence, _Own] = {}
        """Sequences that run."""
        self._read: set[int] = set()
        """The places that the step that is planned now reads."""

    def __len__(self) -> int:
        """The number of states that are remembered."""
        return len(self._by_hash)

    @property
    def free(self) -> int:
        """The places that hold nothing and await nothing."""
        return len(self._free)

    def begin_step(self) -> None:
        self._read.clear()

    def shorten(self, seq: Sequence, count: int, others: Container[bytes]) -> int:
        """How many of the first `count` blocks end with one behind which a state is remembered, or is one of
        the `others`."""
        while count:
            hash = seq.block_hash(count - 1, self._block_size)
            if hash in self._by_hash or hash in others:
                break
            count -= 1
        return count

    def leaving(self, count: int) -> Iterator[bytes]:
        """The names of remembered states among the next `count` places that would be taken."""
        return islice(self._by_hash, max(0, count - len(self._free)))

    def find(self, name: bytes) -> int | None:
        """The place of the state of this name, if it is remembered."""
        return self._by_hash.get(name)

    def put(self, name: bytes, place: int, *, is_filled: bool) -> None:
        """Let others find the state in a place that `take` gave, or give the place back."""
        if is_filled and name not in self._by_hash:
            self._by_hash[name] = place
        else:
            self._free.append(place)

    def begin(self, seq: Sequence, known_blocks: int) -> None:
        """Let a sequence that is admitted go on from a state, and choose where others are remembered.

        These are the end of the first turn, which is the system prompt of a conversation; the end of the
        blocks that are known, where this prompt leaves another; and that of a prompt to be answered, for the
        next turn.
        """
        size, own = self._block_size, _Own()
        self._own[seq] = own
        if seq.computed:
            hash = seq.block_hash(seq.computed // size - 1, size)
            own.source = self._by_hash[hash]
            self._by_hash.move_to_end(hash)
            self._read.add(own.source)
        ends = [known_blocks * size]
        if isinstance(seq.request.params, Sampling):
            ends += [len(seq.tokens), _first_turn(seq.tokens, seq.request.params.stop_token_ids)]
        own.ends = sorted({end - end % size for end in ends if end - end % size > seq.computed})

    def plan(self, seq: Sequence, count: int) -> StepStates:
        """What the row does that computes the next `count` tokens of a sequence."""
        start, end, own = seq.computed, seq.computed + count, self._own[seq]
        wanted = [each for each in own.ends if start < each <= end]
        newest = end - end % self._block_size
        if start >= seq.prompt_len and newest > start and newest not in wanted:
            wanted.append(newest)
        kept: list[tuple[int, int]] = []
        for each in wanted[-MOST_KEPT:]:
            if (place := self.take()) is not None:
                kept.append((each - start, place))
        source, own.source = own.source, -1
        return StepStates(source, tuple(kept)) if kept or source >= 0 else NO_STATES

    def plan_guessed(self, seq: Sequence, guesses: int) -> tuple[int, int] | None:
        """The end of the last block that would be full if so many guesses hold, and a place for its state."""
        newest = seq.computed + guesses
        newest -= newest % self._block_size
        place = self.take() if newest > seq.computed else None
        return None if place is None else (newest, place)

    def land(self, seq: Sequence, row: SeqStep, *, wanted: bool) -> None:
        """Let others find what a landed row has kept, or take the places back if its outcome is not wanted.

        A state behind guesses that do not hold was not kept. While an answer grows, its newest state takes
        the place of the one before.
        """
        for count, place in row.kept:
            if not wanted or row.start + count > seq.computed:
                self._free.append(place)
                continue
            hash = seq.block_hash((row.start + count) // self._block_size - 1, self._block_size)
            self.put(hash, place, is_filled=True)
            if self.published is not None:
                self.published[hash] = None
            if row.start >= seq.prompt_len:
                if seq.newest_state != hash and seq.newest_state in self._by_hash:
                    self._free.append(self._by_hash.pop(seq.newest_state))
                seq.newest_state = hash

    def release(self, seq: Sequence) -> None:
        """Forget a sequence that runs no more, but not its states."""
        self._own.pop(seq, None)

    def forget_all(self) -> None:
        self._free += self._by_hash.values()
        self._by_hash.clear()

    def take(self) -> int | None:
        """A place to write to; None if all are read in this step, or written by steps in flight."""
        if self._free:
            return self._free.pop()
        hash = next((hash for hash, place in self._by_hash.items() if place not in self._read), None)
        return None if hash is None else self._by_hash.pop(hash)


def _first_turn(tokens: list[int], ends: tuple[int, ...]) -> int:
    """The tokens of the first turn, 0 if there is none: chat templates end each turn as answers end."""
    return next((index + 1 for index, token in enumerate(tokens) if token in ends), 0)
