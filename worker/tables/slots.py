"""The tables of slots: their rows on the device, and what the host must know about each slot.

A sequence keeps its slot from `NewSeq` to its end or preemption; the engine hands the numbers out. The last
slot is a dummy that belongs to nobody. Prompt tokens arrive once, sampled ones are written where they were
sampled, so the input of a step is always `tokens[slot, position]` and never waits for the host.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from worker.protocol import NewSeq, Pooling, Sampling, SeqStep

_NO_SAMPLING = Sampling(max_tokens=1)
PROGRESS_WORDS = 12
"""The words of what a device knows of a slot to count on by itself in recorded steps."""
_MULTIPLE = 4
"""The words of which a table's beginning is a multiple: other addresses would be compiled for anew."""


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows of a step that sample a token, in the order of their logits. On the host."""

    slots: np.ndarray  # [R]
    lengths: np.ndarray  # [R] tokens before the new one
    output_index: np.ndarray  # [R] tokens already produced
    bound: Collection[int] = ()
    """The rows whose bounds follow the step."""


class Slots:
    def __init__(
        self,
        target: torch.device,
        count: int,
        max_len: int,
        block_size: int,
        *,
        paged: bool = True,
        shares: Sequence[int] = (1,),
    ) -> None:
        """`paged`: sequences have cache blocks, which those that are computed whole do without.

        `shares`: for each group of attention layers, the layers' blocks that make one of the engine's.
        """
        self.count = self.dummy = count
        self.groups, self._shares = len(shares), shares
        self.max_len, self.block_size, self.paged = max_len, block_size, paged
        self.rooms: dict[str, int] = {}
        """What recorded steps have room for beside tokens, by the names of features, and its size."""
        self.changes_logits = False
        """Whether a feature changes the logits of all rows, so that no recording may choose tokens."""
        rows = count + 1
        self.most_blocks = -(-max_len // block_size) if paged else 0
        # One column more than positions, for the token that is sampled after the last position.
        self.width = max_len + 1
        self._make_tables(target, rows)
        self.params: list[Sampling] = [_NO_SAMPLING] * rows
        self.pooling: list[Pooling | None] = [None] * rows
        self.texts: list[Sequence[int]] = [()] * rows
        """The tokens of sequences that are pooled: where some of them stand decides over what is read."""
        self.prompt_len = np.zeros(rows, np.int64)
        self.without_tokens = np.zeros(
            rows, np.int64
        )  # first tokens that stand for others: no penalty counts them
        self.blocks = [0] * rows  # entries in use of each group's block table
        self._make_options(rows)
        self.shift = np.zeros(rows, np.int64)  # is added to the positions of tokens

    def _make_options(self, rows: int) -> None:
        """What the host knows of how each slot samples."""
        self.temperature, self.min_p = np.zeros((2, rows), np.float32)  # a temperature of 0 is greedy
        self.top_p = np.ones(rows, np.float32)
        self.top_k = np.zeros(rows, np.int64)
        self.seed = np.zeros(rows, np.uint64)
        self.masked = np.zeros(rows, bool)  # has logit_bias, bad_words, allowed_token_ids or min_tokens
        self.penalised, self.filtered, self.logprobs = np.zeros((3, rows), bool)
        self.demanding: set[int] = set()
        """Slots whose next token is not simply the likeliest, or that ask for logprobs."""
        self.prompt_logprobs: dict[int, int] = {}  # slot -> the likeliest tokens told beside its prompt's

    def _make_tables(self, target: torch.device, rows: int) -> None:
        self.first_block = rows * PROGRESS_WORDS
        size = rows * self.most_blocks
        of_group = -(-size // _MULTIPLE) * _MULTIPLE
        self.first_token = self.first_block + self.groups * of_group
        self.words = torch.zeros(self.first_token + rows * self.width, dtype=torch.int32, device=target)
        """All tables, one behind the other: one operation writes what a step brings into them."""
        self.progress = self.words[: self.first_block].view(rows, PROGRESS_WORDS)
        tables = self.words[self.first_block : self.first_token].view(self.groups, of_group)
        self.block_tables = tables[:, :size].view(self.groups, rows, self.most_blocks)
        self.block_table = self.block_tables[0]
        self.tokens = self.words[self.first_token :].view(rows, self.width)
        host = target.type == "cpu"
        self.host_tables = (self.tokens.numpy(), self.block_tables.numpy()) if host else None
        """The arrays of tokens and of blocks, if the host can write to them without waiting."""

    @staticmethod
    def nbytes(count: int, max_len: int, block_size: int, groups: int) -> int:
        """Bytes that the tables take on the device."""
        words = (count + 1) * (max_len + 1 + groups * -(-max_len // block_size) + PROGRESS_WORDS)
        return 4 * (words + groups * _MULTIPLE)

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
        self.prompt_len[slot] = new.prompt_len
        self.without_tokens[slot] = self.shift[slot] = self.blocks[slot] = 0
        self.prompt_logprobs.pop(slot, None)
        if isinstance(new.params, Pooling):
            self.pooling[slot], self.texts[slot] = new.params, new.tokens
        else:
            self.pooling[slot], self.texts[slot] = None, ()
            self._admit_sampling(slot, new.params)

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
        self.filtered[slot] = params.temperature > 0 and (params.typical_p < 1 or params.top_n_sigma > 0)
        self.logprobs[slot] = params.logprobs is not None
        self.demanding.discard(slot)
        if any(each[slot] for each in (self.temperature, self.masked, self.penalised, self.logprobs)):
            self.demanding.add(slot)
        if params.prompt_logprobs is not None:
            self.prompt_logprobs[slot] = params.prompt_logprobs
