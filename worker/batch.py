"""A step as the engine plans it becomes the flat tensors that a model reads.

The only code that knows both layouts: `StepInput`, lists of rows and counts, and `ForwardContext`, packed
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from models.context import ForwardContext
from worker.logprobs import PromptWanted
from worker.pooling import PoolPlan, plan_pools
from worker.protocol import NewSeq, Pooling, SeqStep, StepInput
from worker.sampler import Plan, plan_sampling
from worker.slots import SampleRows, Slots
from worker.staging import Packet


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rows of a step that sample a token."""

    at: Tensor  # [R] place of each row's last token in the step
    slots: Tensor  # [R]
    positions: Tensor  # [R] where the new token goes
    rows: list[int]  # place of each row in StepInput.seqs
    plan: Plan


@dataclass(frozen=True, slots=True)
class Batch:
    ids: Tensor  # [T] int64
    context: ForwardContext
    sampled: Sampled | None
    prompts: list[PromptWanted]
    pooled: PoolPlan | None


@dataclass(frozen=True, slots=True)
class _Columns:
    """StepInput.seqs, turned by 90 degrees."""

    slots: np.ndarray  # [B]
    starts: np.ndarray  # [B]
    counts: np.ndarray  # [B]
    gained: np.ndarray  # [B] new cache blocks
    ends: np.ndarray  # [B] tokens of each sequence once the step is done
    query_starts: np.ndarray  # [B + 1]


def build(
    step: StepInput,
    slots: Slots,
    packet: Packet,
    *,
    num_blocks: int,
    vocab_size: int,
    needs_all_rows: Callable[[Pooling], bool],
) -> Batch:
    """Enter the step's new sequences and blocks in the tables, and lay its tokens out."""
    for new in step.new:
        slots.admit(new)
    columns = _columns(step.seqs)
    _check(step, columns, slots, num_blocks)

    arrived = _stage(packet, *_arrivals(step.new, slots))
    gained = _stage(packet, *_enter_blocks(step.seqs, slots))
    row_of = np.repeat(np.arange(len(step.seqs)), columns.counts)  # [T]
    positions = np.arange(len(row_of)) + (columns.starts - columns.query_starts[:-1])[row_of]  # [T]
    layout = (
        packet.ints(columns.slots),
        packet.ints(row_of),
        packet.ints(positions),
        packet.ints(columns.query_starts),
        packet.ints(columns.ends),
    )
    seconds = _second_texts(columns, slots)
    token_types = None if seconds is None else packet.ints(positions >= seconds[row_of])  # [T]
    sampled = _plan_samples(step.seqs, columns, slots, packet, vocab_size)
    pooled = _plan_pools(step.seqs, columns, slots, packet, needs_all_rows)
    packet.send()  # from here on, the tensors made above hold their values

    slots.tokens.view(-1)[arrived[0]] = arrived[1]
    if slots.paged:
        slots.block_table.view(-1)[gained[0]] = gained[1]
    context, ids = _lay_out(*layout, columns, slots)
    if token_types is not None:
        context.token_types = token_types.long()
    return Batch(ids, context, sampled, _prompt_logprobs(columns, slots), pooled)


def _columns(seqs: list[SeqStep]) -> _Columns:
    table = np.array([(seq.slot, seq.start, seq.count, len(seq.blocks)) for seq in seqs], np.int64)
    slots, starts, counts, gained = table.reshape(-1, 4).T
    return _Columns(slots, starts, counts, gained, starts + counts, np.append(0, np.cumsum(counts)))


def _check(step: StepInput, columns: _Columns, slots: Slots, num_blocks: int) -> None:
    """A plan that contradicts the tables would write into other sequences: refuse it before it does."""
    if not step.seqs:
        raise ValueError(f"step {step.number} has no rows")
    held = slots.blocks[columns.slots] + columns.gained
    no_room = columns.ends > held * slots.block_size if slots.paged else columns.starts > 0
    wrong = np.flatnonzero(
        (columns.starts < 0)
        | (columns.counts < 1)
        | (columns.ends > slots.max_len)
        | no_room
        | (held > slots.block_table.shape[1])
    )
    if len(wrong):
        row = wrong[0]
        raise ValueError(
            f"step {step.number}: {step.seqs[row]} does not fit: a row has {slots.max_len} positions and "
            f"{slots.block_table.shape[1]} blocks of {slots.block_size}, this one would hold {held[row]}"
        )
    if any(not 0 <= block <= num_blocks for seq in step.seqs for block in seq.blocks):
        raise ValueError(f"step {step.number} names a cache block beyond the {num_blocks} there are")


def _stage(packet: Packet, places: ArrayLike, values: ArrayLike) -> tuple[Tensor, Tensor]:
    return packet.ints(places), packet.ints(values)


def _arrivals(new: list[NewSeq], slots: Slots) -> tuple[np.ndarray, list[int]]:
    """Flat places in the table of tokens, and the tokens to write there."""
    lengths = np.array([len(each.tokens) for each in new], np.int64)
    firsts = np.array([each.slot for each in new], np.int64) * slots.tokens.shape[1]
    starts = np.cumsum(lengths) - lengths
    places = np.arange(lengths.sum()) + np.repeat(firsts - starts, lengths)
    return places, [token for each in new for token in each.tokens]


def _enter_blocks(seqs: list[SeqStep], slots: Slots) -> tuple[list[int], list[int]]:
    """Flat places in the block table, and the blocks to write there."""
    places: list[int] = []
    blocks: list[int] = []
    width = slots.block_table.shape[1]
    for seq in seqs:
        if seq.blocks:
            first = seq.slot * width + int(slots.blocks[seq.slot])
            places += range(first, first + len(seq.blocks))
            blocks += seq.blocks
            slots.blocks[seq.slot] += len(seq.blocks)
    return places, blocks


def _plan_samples(
    seqs: list[SeqStep], columns: _Columns, slots: Slots, packet: Packet, vocab_size: int
) -> Sampled | None:
    chosen = [row for row, seq in enumerate(seqs) if seq.samples]
    if not chosen:
        return None
    output_index = np.array([seqs[row].output_index for row in chosen], np.int64)
    rows = SampleRows(columns.slots[chosen], columns.ends[chosen], output_index)
    return Sampled(
        at=packet.ints(columns.query_starts[1:][chosen] - 1),
        slots=packet.ints(rows.slots),
        positions=packet.ints(rows.lengths),
        rows=chosen,
        plan=plan_sampling(packet, slots, rows, vocab_size),
    )


def _plan_pools(
    seqs: list[SeqStep],
    columns: _Columns,
    slots: Slots,
    packet: Packet,
    needs_all_rows: Callable[[Pooling], bool],
) -> PoolPlan | None:
    chosen = [row for row, seq in enumerate(seqs) if seq.pools]
    if not chosen:
        return None
    asked = [params for row in chosen if (params := slots.pooling[seqs[row].slot]) is not None]
    if len(asked) < len(chosen):
        raise ValueError("a step pools a sequence that was not admitted for it")
    return plan_pools(
        packet,
        rows=np.array(chosen),
        params=asked,
        needs_all=np.array([needs_all_rows(params) for params in asked]),
        slots=columns.slots[chosen],
        starts=columns.starts[chosen],
        ends=columns.ends[chosen],
        query_starts=columns.query_starts[:-1][chosen],
    )


def _second_texts(columns: _Columns, slots: Slots) -> np.ndarray | None:
    """[B] where the second text of each row begins; None if no model asks or no row is a pair."""
    if slots.paged:
        return None
    begins = [params.second_at if (params := slots.pooling[slot]) else 0 for slot in columns.slots]
    return np.array([at or slots.max_len for at in begins]) if any(begins) else None


def _lay_out(
    row_slots: Tensor,  # [B]
    row_of: Tensor,  # [T]
    places: Tensor,  # [T]
    query_starts: Tensor,  # [B + 1]
    kv_lens: Tensor,  # [B]
    columns: _Columns,
    slots: Slots,
) -> tuple[ForwardContext, Tensor]:
    positions = places.long()  # [T]
    width = -(-int(columns.ends.max()) // slots.block_size)
    block_table = slots.block_table[:, :width].index_select(0, row_slots)  # [B, blocks of the longest]
    slot_mapping = positions  # without a cache nothing reads it
    if slots.paged:
        blocks = block_table[row_of, positions // slots.block_size].long()  # [T]
        slot_mapping = blocks * slots.block_size + positions % slots.block_size
    context = ForwardContext(
        positions=positions,
        query_starts=query_starts,
        kv_lens=kv_lens,
        block_table=block_table,
        slot_mapping=slot_mapping,
        block_size=slots.block_size,
        query_lens_host=columns.counts.tolist(),
        kv_lens_host=columns.ends.tolist(),
    )
    return context, slots.tokens[row_slots[row_of], positions].long()


def _prompt_logprobs(columns: _Columns, slots: Slots) -> list[PromptWanted]:
    """Position p of a prompt speaks about token p + 1, as long as that belongs to the prompt."""
    wanted: list[PromptWanted] = []
    for row in np.flatnonzero(slots.prompt_logprobs[columns.slots]):
        slot, start, first = int(columns.slots[row]), int(columns.starts[row]), int(columns.query_starts[row])
        stop = min(int(columns.ends[row]), int(slots.prompt_len[slot]) - 1)
        top = slots.params[slot].prompt_logprobs
        if top is not None and start < stop:
            chosen = slots.tokens[slot, start + 1 : stop + 1].long()  # [M]
            wanted.append(PromptWanted(slot, slice(first, first + stop - start), chosen, top))
    return wanted
