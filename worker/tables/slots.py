"""The tables of slots: their rows on the device, and what the host must know about each slot.

A sequence keeps its slot from `NewSeq` to its end or preemption; the engine hands the numbers out. The last
slot is a dummy that belongs to nobody. Prompt tokens arrive once, sampled ones are written where they were
sampled, so the input of a step is always `tokens[slot, position]` and never waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from models.context import AdapterRows, ForwardContext
from models.media.positions import three_axes
from worker.protocol import MediaPlace, NewSeq, Pooling, Sampling, SeqStep
from worker.tables.staging import Packet

_NO_SAMPLING = Sampling(max_tokens=1)
MOST_GUESSES = 1 << 30
"""The number of guesses of a step that have room wherever nothing is kept of them."""
STATE_WORDS = 12
"""The words of what a device knows of a slot to count on by itself (`recorded_forms.py`)."""
_ALIGNED = 4
"""The words of which a table's beginning is a multiple: other addresses would be compiled for anew."""


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows of a step that sample a token, in the order of their logits. On the host."""

    slots: np.ndarray  # [R]
    lengths: np.ndarray  # [R] tokens before the new one
    output_index: np.ndarray  # [R] tokens already produced
    bound: Collection[int] = ()
    """The rows whose bounds follow the step."""


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """The media of a sequence, and the positions in whose place their E embeddings are put."""

    items: Sequence[MediaPlace]
    positions: np.ndarray  # [E], rising
    ends: np.ndarray  # [E] the last position of the run to which each belongs
    firsts: list[int]
    """For each item its first embedding among all, and behind them E."""
    axes: np.ndarray | None  # [3, end] the positions of tokens up to `end`, if they have three axes
    shift: int
    """What is added to the places of tokens behind it."""

    @property
    def end(self) -> int:
        """The position behind the last embedding."""
        return int(self.positions[-1]) + 1

    @classmethod
    def of(cls, items: Sequence[MediaPlace], *, on_axes: bool) -> PlacedMedia:
        runs = np.array([(item.at + first, length) for item in items for first, length in item.runs])
        starts, lengths = runs.T
        behind = np.cumsum(lengths)
        positions = np.arange(behind[-1]) + np.repeat(starts - behind + lengths, lengths)
        counts = [sum(length for _, length in item.runs) for item in items]
        axes, shift = three_axes(int(positions[-1]) + 1, items) if on_axes else (None, 0)
        ends, firsts = np.repeat(starts + lengths - 1, lengths), [0, *accumulate(counts)]
        return cls(items, positions, ends, firsts, axes, shift)


class SourceTable(Protocol):
    """The sources of slots: `worker.tables.sources.SourceTable`."""

    width: int

    def admit(self, new: NewSeq) -> None: ...

    def stage(
        self, columns: Any, packet: Packet, queries: list[Tensor] | None
    ) -> Callable[[ForwardContext], None]: ...

    def blocks_of(self, slot: int) -> tuple[list[int], int]: ...


class RowProcessors(Protocol):
    """What changes the logits of all rows that sample: `worker.sampling.processors.LogitsProcessors`."""

    def admit(self, new: NewSeq) -> None: ...

    def apply(self, logits: Tensor, slots: Sequence[int], last_tokens: Tensor) -> dict[int, str]: ...


class Adapting(Protocol):
    """The adapters of a worker."""

    tasks: dict[tuple[int, str], str]
    """The number of an adapter, and a task -> the task as which the pooler has the adapter's own head."""

    of_head: set[int]
    """The numbers of those that change the LM head."""

    def bring(self, numbers: Iterable[int]) -> None:
        """Have the adapters with these numbers where the next step reads them; 0 is none."""
        ...


class Slots:
    def __init__(
        self,
        target: torch.device,
        count: int,
        max_len: int,
        block_size: int,
        *,
        paged: bool = True,
        has_states: bool = False,
        most_guesses: int = MOST_GUESSES,
        shares: Sequence[int] = (1,),
        on_axes: bool = False,
        processors: RowProcessors | None = None,
        adapting: Adapting | None = None,
        sources: SourceTable | None = None,
    ) -> None:
        """`paged`: sequences have cache blocks. An encoder's have none, because each is computed whole.

        `most_guesses`: how many guesses a step may have; 0: the model takes none.
        `shares`: for each group of attention layers, the layers' blocks that make one of the engine's.
        `adapting`: None: there are no adapters.
        `on_axes`: whether tokens have positions on three axes where there are media.
        """
        self.count = self.dummy = count
        self.groups, self._shares = len(shares), shares
        self.processors, self.sources = processors, sources
        self.max_len, self.block_size, self.most_guesses = max_len, block_size, most_guesses
        self.paged, self.has_states, self.on_axes = paged, has_states, on_axes
        self._adapting = adapting
        rows = count + 1
        self.most_blocks = -(-max_len // block_size) if paged else 0
        # One column more than positions, for the token that is sampled after the last position.
        self.width = max_len + 1
        self._make_tables(target, rows)
        self.params: list[Sampling] = [_NO_SAMPLING] * rows
        self.pooling: list[Pooling | None] = [None] * rows
        self.texts: list[Sequence[int]] = [()] * rows
        """The tokens of sequences that are pooled: where some of them stand decides over what is read."""
        self.aligned: set[int] = set()
        """Slots whose sequences are compared with their sources, token by token."""
        self.prompt_len = np.zeros(rows, np.int64)
        self.without_tokens = np.zeros(rows, np.int64)  # of prompts with embeddings, which no penalty counts
        self.blocks = [0] * rows  # entries in use of each group's block table
        self._make_options(rows)
        self.media: dict[int, PlacedMedia] = {}  # of the slots whose sequences have some
        self.shift = np.zeros(rows, np.int64)  # is added to places behind media that have three axes

    def _make_options(self, rows: int) -> None:
        """What the host knows of how each slot samples."""
        self.temperature, self.min_p = np.zeros((2, rows), np.float32)  # a temperature of 0 is greedy
        self.top_p = np.ones(rows, np.float32)
        self.top_k = np.zeros(rows, np.int64)
        self.seed = np.zeros(rows, np.uint64)
        self.masked = np.zeros(rows, bool)  # has logit_bias, bad_words, allowed_token_ids or min_tokens
        self.penalised, self.logprobs = np.zeros((2, rows), bool)
        self.demanding: set[int] = set()
        """Slots whose next token is not simply the likeliest, or that ask for logprobs."""
        self.wants_prompt_logprobs: set[int] = set()  # slots that ask for them

    def _make_tables(self, target: torch.device, rows: int) -> None:
        self.first_block = rows * STATE_WORDS
        size = rows * self.most_blocks
        of_group = -(-size // _ALIGNED) * _ALIGNED
        self.first_token = self.first_block + self.groups * of_group
        self.words = torch.zeros(self.first_token + rows * self.width, dtype=torch.int32, device=target)
        """All tables, one behind the other: one operation writes what a step brings into them."""
        self.states = self.words[: self.first_block].view(rows, STATE_WORDS)
        tables = self.words[self.first_block : self.first_token].view(self.groups, of_group)
        self.block_tables = tables[:, :size].view(self.groups, rows, self.most_blocks)
        self.block_table = self.block_tables[0]
        self.tokens = self.words[self.first_token :].view(rows, self.width)
        host = target.type == "cpu"
        self.host_tables = (self.tokens.numpy(), self.block_tables.numpy()) if host else None
        """The arrays of tokens and of blocks, if the host can write to them without waiting."""
        self.adapters = [(0, 0)] * rows
        """The number of each slot's adapter, 0 for none, and the first position that it computes."""
        self.adapted: set[int] = set()
        """The slots that have one."""

    @property
    def adapts(self) -> bool:
        """Whether sequences may have adapters."""
        return self._adapting is not None

    @staticmethod
    def nbytes(count: int, max_len: int, block_size: int, groups: int) -> int:
        """Bytes that the tables take on the device."""
        words = (count + 1) * (max_len + 1 + groups * -(-max_len // block_size) + STATE_WORDS)
        return 4 * (words + groups * _ALIGNED)

    @property
    def first_remembered(self) -> int | None:
        """The place of the first remembered state, behind those of slots; None if no layer has states."""
        return self.count + 1 if self.has_states else None

    def entries(self, seq: SeqStep) -> list[list[int]]:
        """The new entries of a sequence in the block table of each group."""
        if self.groups == 1:
            return [seq.blocks]
        each = len(seq.blocks) // self.groups
        pieces = (seq.blocks[at * each : (at + 1) * each] for at in range(self.groups))
        return [[share * block for block in own] for share, own in zip(self._shares, pieces, strict=True)]

    def admit(self, new: NewSeq) -> None:
        """Note what the host must know of a new sequence. Its tokens travel with the step that brings it."""
        slot = new.slot
        if not 0 <= slot <= self.dummy:
            raise ValueError(f"slot {slot} does not exist: slots go from 0 to {self.count - 1}")
        if not 1 <= len(new.tokens) <= self.max_len:
            raise ValueError(
                f"a sequence of {len(new.tokens)} tokens: a slot has room for 1 to {self.max_len}"
            )
        if self.processors is not None:
            self.processors.admit(new)
        if self.sources is not None:
            self.sources.admit(new)
        self.prompt_len[slot] = new.prompt_len
        has_rows = any(place.kind == "rows" for place in new.media)
        self.without_tokens[slot] = new.prompt_len if has_rows else 0
        self.blocks[slot] = 0
        self._adapt(slot, (new.adapter, new.adapter_from))
        self.wants_prompt_logprobs.discard(slot)
        self.media.pop(slot, None)
        self.shift[slot] = 0
        if new.media:
            self.media[slot] = placed = PlacedMedia.of(new.media, on_axes=self.on_axes)
            self.shift[slot] = placed.shift
        if isinstance(new.params, Pooling):
            tasks = {} if self._adapting is None else self._adapting.tasks
            own: Any = tasks.get((new.adapter, new.params.task))
            params = new.params if own is None else msgspec.structs.replace(new.params, task=own)
            self.pooling[slot], self.texts[slot] = params, new.tokens
            (self.aligned.add if params.task == "align" else self.aligned.discard)(slot)
        else:
            self.aligned.discard(slot)
            self.pooling[slot], self.texts[slot] = None, ()
            self._admit_sampling(slot, new.params)

    def bring_adapters(self, held: Sequence[int]) -> None:
        """Have the adapters of these slots where the next step reads them."""
        if self._adapting is not None and not self.adapted.isdisjoint(held):
            self._adapting.bring(self.adapters[slot][0] for slot in held)

    def adapt_head(self, rows: AdapterRows | None) -> bool:
        """Whether adapters of a step's tokens may change the LM head."""
        if self._adapting is None or rows is None:
            return False
        return not rows.host or any(number in self._adapting.of_head for number, _, _ in rows.host)

    def _adapt(self, slot: int, adapter: tuple[int, int]) -> None:
        self.adapters[slot] = adapter
        (self.adapted.add if adapter[0] else self.adapted.discard)(slot)

    def _admit_sampling(self, slot: int, params: Sampling) -> None:
        self.params[slot] = params
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.top_k[slot] = params.top_k
        self.min_p[slot] = params.min_p
        self.seed[slot] = params.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.masked[slot] = bool(
            params.logit_bias
            or params.bad_words
            or params.allowed_token_ids
            or params.min_tokens
            or params.suppressed
            or params.suppressed_first
            or params.timestamps
        )
        self.penalised[slot] = (
            params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        )
        self.logprobs[slot] = params.logprobs is not None
        self.demanding.discard(slot)
        if any(each[slot] for each in (self.temperature, self.masked, self.penalised, self.logprobs)):
            self.demanding.add(slot)
        if params.prompt_logprobs is not None:
            self.wants_prompt_logprobs.add(slot)
