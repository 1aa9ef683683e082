"""A step as the device computes it, planned on the host from the step as the engine sees it.

This is the only code that knows both layouts: `StepInput`, lists of slots and counts, and the flat tensors of
packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from worker.pooling.plan import PoolPlan, plan_pools, segments_of
from worker.protocol import NewSeq, Pooling, SeqStep, StepInput
from worker.sampling.logprobs import PromptLogprobPlan
from worker.sampling.sampler import GREEDY, SampleTargets, plan_sampling
from worker.tables.forms import Form, Forms, MixedForm, StagedForm, can_choose, find_form, send_form
from worker.tables.positions import Columns, LayOut, StepTokens, lay_out
from worker.tables.slots import SampleRows, Slots
from worker.tables.staging import Packet

NeededPositions = Callable[[Pooling, Sequence[int]], Sequence[int]]
"""The type of a function that names the positions of a sequence of these tokens that its pooling reads."""


@dataclass(frozen=True, slots=True)
class Batch:
    """All that the device must be told of a step, on the way there."""

    step: StepInput
    lay_out: Callable[[], StepTokens]
    """The function that writes the tables and lays the tokens out, on the device. It is called once."""
    sampled: SampleTargets | None
    prompt_logprobs: list[PromptLogprobPlan]
    pooled: PoolPlan | None
    form: Form | MixedForm | None = None
    """The recorded form in which the step is sent. It is laid out, then, by the recording."""


def plan(
    step: StepInput,
    slots: Slots,
    packet: Packet,
    *,
    num_blocks: int,
    vocab_size: int,
    needed_positions: NeededPositions,
    lay_out: LayOut = lay_out,
    forms: Forms | None = None,
) -> Batch:
    """Note the step's new sequences and blocks, and send what the device must know of it."""
    for new in step.new:
        slots.admit(new)
    _check(step, slots, num_blocks)
    columns = Columns.of(step.seqs)
    types = _token_types(columns, slots)
    staged = None
    if forms is not None:
        if step.fresh:
            forms.states.forget()
        if not step.new and (form := find_form(forms, step.seqs, slots)) is not None:
            return _plan_form(forms, form, step, columns, slots, packet, vocab_size)
        staged = _stage_mixed(forms, step.seqs, columns, types, slots, packet)

    write_tables = _stage_tables(step, forms, slots, packet)
    finish = lay_out(columns, slots, packet) if staged is None else staged.finish
    token_types = packet.ints(types) if types is not None and staged is None else None
    if forms is not None and staged is not None and staged.form.whole:
        sampled = _samples_of(forms, step.seqs)
    else:
        sampled = _plan_samples(step.seqs, columns, slots, packet, vocab_size)
    pooled = _plan_pools(step.seqs, columns, slots, packet, needed_positions)
    packet.send()  # from here on, the tensors made above hold their values

    def lay_tokens_out() -> StepTokens:
        write_tables()
        ids, context = finish()
        if token_types is not None:
            context.token_types = token_types.long()
        return ids, context

    form = None if staged is None else staged.form
    return Batch(step, lay_tokens_out, sampled, _prompt_logprobs(columns, slots), pooled, form)


def _stage_mixed(
    forms: Forms,
    seqs: Sequence[SeqStep],
    columns: Columns,
    types: list[int] | None,
    slots: Slots,
    packet: Packet,
) -> StagedForm | None:
    sampling = [row for row, seq in enumerate(seqs) if seq.samples]
    if not can_choose(forms, [seqs[row] for row in sampling], slots):
        sampling = []
    return forms.stage_mixed(columns, types, sampling, packet)


def _plan_form(
    forms: Forms,
    form: Form,
    step: StepInput,
    columns: Columns,
    slots: Slots,
    packet: Packet,
    vocab_size: int,
) -> Batch:
    """Send a step as a form, and behind it what sampling needs if the recording ends with the logits."""
    send_form(forms, form, step.seqs, slots, packet)
    if form.whole:
        sampled = _samples_of(forms, step.seqs)
    else:
        sampled = _plan_samples(step.seqs, columns, slots, packet, vocab_size)
    packet.send()
    return Batch(step, _not_laid_out, sampled, [], None, form)


def _not_laid_out() -> StepTokens:
    raise ValueError("a step was sent as a form, and nobody replays it")


def _check(step: StepInput, slots: Slots, num_blocks: int) -> None:
    """Refuse a step that contradicts the tables, before it writes into other sequences."""
    if not step.seqs:
        raise ValueError(f"step {step.number} has no rows")
    for seq in step.seqs:
        start, end, held = seq.start, seq.start + seq.count, slots.blocks[seq.slot] + len(seq.blocks)
        has_room = end <= held * slots.block_size if slots.paged else start == 0
        if not (0 <= start < end <= slots.max_len and has_room and held <= slots.most_blocks):
            raise ValueError(
                f"step {step.number}: {seq} does not fit: a slot has {slots.max_len} positions and "
                f"{slots.most_blocks} blocks of {slots.block_size}, this one would hold {held}"
            )
        if seq.blocks and not 0 <= min(seq.blocks) <= max(seq.blocks) <= num_blocks:
            raise ValueError(f"step {step.number} names a cache block beyond the {num_blocks} there are")


def _stage_tables(step: StepInput, forms: Forms | None, slots: Slots, packet: Packet) -> Callable[[], None]:
    """Stage new tokens, new blocks, and what recordings must know of sequences that are not to be pooled.

    The returned function writes them, once the packet is on the device. Tables that the host can reach are
    written at once.
    """
    grown = [seq for seq in step.seqs if seq.blocks]
    staged: list[tuple[ArrayLike, ArrayLike]] = []
    if slots.host_tables is not None:
        _write_tables(*slots.host_tables, step.new, grown, slots)
    else:
        staged += [_new_tokens(step.new, slots)] if step.new else []
        staged += [_new_blocks(grown, slots)] if grown else []
    sampling = [seq for seq in step.seqs if slots.pooling[seq.slot] is None]
    if forms is not None and sampling:
        staged.append(forms.states.after(sampling))
    if not staged:
        return lambda: None
    flat, words = (packet.ints(np.concatenate(each)) for each in zip(*staged, strict=True))

    def write() -> None:
        slots.words[flat] = words

    return write


def _write_tables(
    tokens: np.ndarray, blocks: np.ndarray, new: list[NewSeq], grown: list[SeqStep], slots: Slots
) -> None:
    for each in new:
        tokens[each.slot, : len(each.tokens)] = each.tokens
    for seq in grown:
        first = slots.blocks[seq.slot]
        blocks[seq.slot, first : first + len(seq.blocks)] = seq.blocks
        slots.blocks[seq.slot] += len(seq.blocks)


def _new_tokens(new: list[NewSeq], slots: Slots) -> tuple[np.ndarray, list[int]]:
    """Places in the memory of all tables, and the tokens to write there."""
    lengths = np.array([len(each.tokens) for each in new], np.int64)
    firsts = slots.first_token + np.array([each.slot for each in new], np.int64) * slots.width
    starts = np.cumsum(lengths) - lengths
    flat = np.arange(lengths.sum()) + np.repeat(firsts - starts, lengths)
    return flat, [token for each in new for token in each.tokens]


def _new_blocks(grown: list[SeqStep], slots: Slots) -> tuple[list[int], list[int]]:
    """Places in the memory of all tables, and the blocks to write there."""
    flat: list[int] = []
    blocks: list[int] = []
    for seq in grown:
        first = slots.first_block + seq.slot * slots.most_blocks + slots.blocks[seq.slot]
        flat += range(first, first + len(seq.blocks))
        blocks += seq.blocks
        slots.blocks[seq.slot] += len(seq.blocks)
    return flat, blocks


def _plan_samples(
    seqs: list[SeqStep], columns: Columns, slots: Slots, packet: Packet, vocab_size: int
) -> SampleTargets | None:
    chosen = [row for row, seq in enumerate(seqs) if seq.samples]
    if not chosen:
        return None
    bound = {seqs[row].slot: at for at, row in enumerate(chosen) if seqs[row].bound}
    held, ends = [columns.slots[row] for row in chosen], [columns.ends[row] for row in chosen]
    plan = GREEDY
    if not slots.demanding.isdisjoint(held):
        output_index = np.array([seqs[row].output_index for row in chosen], np.int64)
        rows = SampleRows(np.array(held), np.array(ends), output_index, bound.values())
        plan = plan_sampling(packet, slots, rows, vocab_size)
    last = [columns.query_starts[row + 1] - 1 for row in chosen]
    return SampleTargets(
        last=None if len(chosen) == columns.query_starts[-1] else packet.ints(last),
        flat=packet.ints([slot * slots.width + end for slot, end in zip(held, ends, strict=True)]),
        rows=chosen,
        plan=plan,
        bound=bound,
    )


def _samples_of(forms: Forms, seqs: Sequence[SeqStep]) -> SampleTargets:
    """The rows that sample in a step whose recording chooses their tokens, and writes them itself."""
    rows = [row for row, seq in enumerate(seqs) if seq.samples]
    return SampleTargets(None, forms.buffer[:0], rows, GREEDY, {})


def _plan_pools(
    seqs: list[SeqStep],
    columns: Columns,
    slots: Slots,
    packet: Packet,
    needed_positions: NeededPositions,
) -> PoolPlan | None:
    chosen = [row for row, seq in enumerate(seqs) if seq.pools]
    if not chosen:
        return None
    asked = [params for row in chosen if (params := slots.pooling[seqs[row].slot]) is not None]
    if len(asked) < len(chosen):
        raise ValueError("a step pools a sequence that was not admitted for it")
    texts = [slots.texts[seqs[row].slot] for row in chosen]
    needed = [needed_positions(params, text) for params, text in zip(asked, texts, strict=True)]
    if not any(columns.starts) and [len(own) for own in needed] == columns.counts:  # an encoder's texts
        return PoolPlan(chosen, asked, segments_of(packet, columns.counts, asked), None)
    return plan_pools(
        packet,
        rows=np.array(chosen),
        params=asked,
        needed=needed,
        slots=np.array(columns.slots)[chosen],
        starts=np.array(columns.starts)[chosen],
        query_starts=np.array(columns.query_starts)[chosen],
    )


def _token_types(columns: Columns, slots: Slots) -> list[int] | None:
    """The type of each token: 1 in the second text of a pair, else 0. None if all are 0."""
    if slots.paged:
        return None
    begins = [params.second_at if (params := slots.pooling[slot]) else 0 for slot in columns.slots]
    if not any(begins):
        return None
    lengths = zip(begins, columns.counts, strict=True)  # a text is computed whole
    return [int(0 < second <= at) for second, count in lengths for at in range(count)]


def _prompt_logprobs(columns: Columns, slots: Slots) -> list[PromptLogprobPlan]:
    """The hidden state of position p predicts token p + 1, as long as that belongs to the prompt."""
    plans: list[PromptLogprobPlan] = []
    if slots.wants_prompt_logprobs.isdisjoint(columns.slots):
        return plans
    for row, slot in enumerate(columns.slots):
        start, first = columns.starts[row], columns.query_starts[row]
        stop = min(columns.ends[row], int(slots.prompt_len[slot]) - 1)
        count = slots.params[slot].prompt_logprobs
        if slot in slots.wants_prompt_logprobs and count is not None and start < stop:
            rows, tokens = slice(first, first + stop - start), slice(start + 1, stop + 1)
            plans.append(PromptLogprobPlan(slot, rows, tokens, count))
    return plans
