"""Plans steps: a step as the engine sees it becomes a batch as the device computes it.

This is the only code that knows both layouts: `StepInput`, lists of slots and counts, and the flat tensors of
packed tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from worker.protocol import SeqStep, StepInput
from worker.sampling.logprobs import PromptLogprobPlan
from worker.sampling.sampler import GREEDY, SampleTargets, plan_sampling
from worker.steps.batch import Batch
from worker.steps.feature import Hooks, Read
from worker.tables.positions import Columns, LayOut, StepTokens, lay_out
from worker.tables.recorded_forms import Form, Forms, StagedForm, can_choose, find_form, send_form
from worker.tables.slots import SampleRows, Slots
from worker.tables.staging import Packet


@dataclass(frozen=True, slots=True)
class StepPlanner:
    """Plans the steps of one worker, for its tables."""

    slots: Slots
    num_blocks: int
    vocab_size: int
    hooks: Hooks
    lay_out: LayOut = lay_out
    forms: Forms | None = None

    def plan(self, asked: StepInput, packet: Packet) -> Batch:
        """Note the step's new sequences and blocks, and send what the device must know of it."""
        step = self._enter(asked)
        columns = Columns.of(step.seqs)
        for lay in self.hooks.lay:
            lay(columns, asked)
        reads = [found for read in self.hooks.read if (found := read(columns, asked)) is not None]

        recorded = (
            None if self.forms is None else self._begin_form(self.forms, asked, step, columns, reads, packet)
        )
        single = recorded is not None and isinstance(recorded.form, Form)
        write_tables = _nothing if single else self._stage_tables(asked, step, packet)
        finish = self.lay_out(columns, self.slots, packet) if recorded is None else recorded.finish
        shown = [] if single else [each.stage(packet) for each in reads]
        if self.forms is not None and recorded is not None and recorded.form.whole:
            sampled = _sampled_by(self.forms, step.seqs)
        else:
            sampled = self._plan_samples(step.seqs, columns, packet)
        for stage in self.hooks.stage:
            stage(columns, step, packet)
        packet.send()  # from here on, the tensors made above hold their values

        def lay_tokens_out() -> StepTokens:
            write_tables()
            ids, context = finish()
            for show in shown:
                show(context)
            return ids, context

        form, tables = None if recorded is None else recorded.form, self._prompt_logprobs(columns)
        return Batch(step, asked, lay_tokens_out, sampled, tables, form)

    def _enter(self, asked: StepInput) -> StepInput:
        """Note a step's new sequences, and check it; returns it with a row for all that is computed."""
        for new in asked.new:
            self.slots.admit(new)
            for admit in self.hooks.admit:
                admit(new)
        self._check(asked)
        step = asked
        for add_rows in self.hooks.add_rows:
            step = add_rows(step)
        return step

    def _begin_form(
        self,
        forms: Forms,
        asked: StepInput,
        step: StepInput,
        columns: Columns,
        reads: Sequence[Read],
        packet: Packet,
    ) -> StagedForm | None:
        """Begin a packet with the recorded form of a step, if there is one that has all of it."""
        if step.fresh:
            forms.progress.forget()
        if step is asked and not step.new and all(each.in_recording for each in reads):
            form = find_form(forms, step.seqs, columns, self.slots)
            if form is not None:
                return send_form(forms, form, step.seqs, columns, self.slots, packet)
        if reads:
            return None
        sampling = [row for row, seq in enumerate(step.seqs) if seq.samples]
        if not can_choose(forms, [step.seqs[row] for row in sampling], self.slots):
            sampling = []
        return forms.stage_mixed(columns, sampling, packet)

    def _check(self, step: StepInput) -> None:
        """Refuse a step that contradicts the tables, before it writes into other sequences."""
        slots = self.slots
        if not step.seqs:
            raise ValueError(f"step {step.number} has no rows")
        for seq in step.seqs:
            start, end = seq.start, seq.end
            held = slots.blocks[seq.slot] + len(seq.blocks) // slots.groups
            has_room = end <= held * slots.block_size if slots.paged else start == 0
            if not (
                0 <= start < start + seq.count <= end <= slots.max_len
                and has_room
                and held <= slots.most_blocks
            ):
                raise ValueError(
                    f"step {step.number}: {seq} does not fit: a slot has {slots.max_len} positions and "
                    f"{slots.most_blocks} blocks of {slots.block_size}, this one would hold {held}"
                )
            if seq.blocks and not 0 <= min(seq.blocks) <= max(seq.blocks) <= self.num_blocks:
                raise ValueError(
                    f"step {step.number} names a cache block beyond the {self.num_blocks} there are"
                )

    def _stage_tables(self, asked: StepInput, step: StepInput, packet: Packet) -> Callable[[], None]:
        """Stage new tokens, new blocks, and what recordings must know of sequences that are not to be pooled.

        The returned function writes them, once the packet is on the device. Tables that the host can reach
        are written at once.
        """
        slots = self.slots
        texts: list[_Text] = [(new.slot, 0, new.tokens) for new in asked.new]
        for more in self.hooks.texts if step is not asked else ():
            texts += more(asked)
        grown = [seq for seq in asked.seqs if seq.blocks]
        staged: list[tuple[ArrayLike, ArrayLike]] = []
        if slots.host_tables is not None:
            _write_tables(*slots.host_tables, texts, grown, slots)
        else:
            staged += [_new_tokens(texts, slots)] if texts else []
            staged += [_new_blocks(grown, slots)] if grown else []
        if self.forms is not None and (sampling := self._single_rows(self.forms, asked, step)):
            staged.append(self.forms.progress.after(sampling))
        if not staged:
            return _nothing
        flat, words = (packet.ints(np.concatenate(each)) for each in zip(*staged, strict=True))

        def write() -> None:
            slots.words[flat] = words

        return write

    def _single_rows(self, forms: Forms, asked: StepInput, step: StepInput) -> list[SeqStep]:
        """Find the rows of sequences that are not pooled; how far one with several gets, nobody knows yet."""
        sampling = [seq for seq in asked.seqs if self.slots.pooling[seq.slot] is None]
        if step is asked:
            return sampling
        rows = Counter(seq.slot for seq in step.seqs)
        forms.progress.forget([slot for slot, count in rows.items() if count > 1])
        return [seq for seq in sampling if rows[seq.slot] == 1]

    def _plan_samples(self, seqs: list[SeqStep], columns: Columns, packet: Packet) -> SampleTargets | None:
        chosen = [row for row, seq in enumerate(seqs) if seq.samples]
        if not chosen:
            return None
        slots = self.slots
        bound: dict[int, list[int]] = {}
        for at, row in enumerate(chosen):
            if seqs[row].bound:
                bound.setdefault(seqs[row].slot, []).append(at)
        held, ends = [columns.slots[row] for row in chosen], [columns.ends[row] for row in chosen]
        plan = GREEDY
        if not slots.demanding.isdisjoint(held):
            output_index = np.array([seqs[row].output_index for row in chosen], np.int64)
            bound_rows = set[int]().union(*bound.values())
            rows = SampleRows(np.array(held), np.array(ends), output_index, bound_rows)
            plan = plan_sampling(packet, slots, rows, self.vocab_size)
        last = [columns.query_starts[row + 1] - 1 for row in chosen]
        return SampleTargets(
            last=None if len(chosen) == columns.query_starts[-1] else packet.ints(last),
            flat=packet.ints([slot * slots.width + end for slot, end in zip(held, ends, strict=True)]),
            rows=chosen,
            plan=plan,
            bound=bound,
            slots=held,
        )

    def _prompt_logprobs(self, columns: Columns) -> list[PromptLogprobPlan]:
        """The hidden state of position p predicts token p + 1, as long as that belongs to the prompt."""
        plans: list[PromptLogprobPlan] = []
        slots = self.slots
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


def _nothing() -> None:
    """Write nothing: there is nothing to write."""


def _sampled_by(forms: Forms, seqs: Sequence[SeqStep]) -> SampleTargets:
    """The rows that sample in a step whose recording chooses their tokens, and writes them itself."""
    rows = [row for row, seq in enumerate(seqs) if seq.samples]
    return SampleTargets(None, forms.buffer[:0], rows, GREEDY, {})


_Text = tuple[int, int, Sequence[int]]
"""The type of tokens that a step brings: their slot, the position of the first, and the tokens."""


def _write_tables(
    tokens: np.ndarray, blocks: np.ndarray, texts: list[_Text], grown: list[SeqStep], slots: Slots
) -> None:
    for slot, start, text in texts:
        tokens[slot, start : start + len(text)] = text
    for seq in grown:
        first = slots.blocks[seq.slot]
        slots.blocks[seq.slot] = stop = first + len(seq.blocks) // slots.groups
        blocks[:, seq.slot, first:stop] = slots.entries(seq)


def _new_tokens(texts: list[_Text], slots: Slots) -> tuple[np.ndarray, list[int]]:
    """Places in the memory of all tables, and the tokens to write there."""
    lengths = np.array([len(text) for _, _, text in texts], np.int64)
    firsts = slots.first_token + np.array([slot * slots.width + at for slot, at, _ in texts], np.int64)
    starts = np.cumsum(lengths) - lengths
    flat = np.arange(lengths.sum()) + np.repeat(firsts - starts, lengths)
    return flat, [token for _, _, text in texts for token in text]


def _new_blocks(grown: list[SeqStep], slots: Slots) -> tuple[list[int], list[int]]:
    """Places in the memory of all tables, and the blocks to write there."""
    flat: list[int] = []
    blocks: list[int] = []
    for seq in grown:
        first = slots.first_block + seq.slot * slots.most_blocks + slots.blocks[seq.slot]
        for own in slots.entries(seq):
            flat += range(first, first + len(own))
            blocks += own
            first += slots.block_tables.stride(0)
        slots.blocks[seq.slot] += len(seq.blocks) // slots.groups
    return flat, blocks
