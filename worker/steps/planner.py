"""Plans steps: a step as the engine sees it becomes a batch as the device computes it.

This is the only code that knows both layouts: `StepInput`, lists of slots and counts, and the flat tensors of
packed tokens. Each step takes the same way: note what is new, have features add rows and tell what the step
reads, let the device begin the packet, add tables and the options of rows that sample, and send it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from worker.host.memory import Pages
from worker.protocol import SeqStep, StepInput
from worker.sampling.logprobs import PromptLogprobPlan
from worker.sampling.sampler import GREEDY, SampleTargets, plan_sampling
from worker.sampling.token_bounds import NextBounds, nothing_follows
from worker.steps.batch import Batch, Begin, NewTokens, NotedStep, Pool, Staged, Tell, Write
from worker.steps.feature import Hooks
from worker.tables.positions import Columns, StepTokens
from worker.tables.slots import SampleRows, Slots
from worker.tables.staging import Packet


@dataclass(frozen=True, slots=True)
class StepPlanner:
    """Plans the steps of one worker, for its tables."""

    slots: Slots
    num_blocks: int
    vocab_size: int
    hooks: Hooks
    begin: Begin
    pages: Pages = field(default_factory=Pages)
    """The pages of the memory of cache blocks, which are made ahead of the blocks that steps write."""

    def note(self, asked: StepInput) -> NotedStep:
        """Note a step's new sequences and blocks, let features add rows, and tell what the step reads."""
        texts: list[NewTokens] = []
        for new in asked.new:
            self.slots.admit(new)
            texts.append((new.slot, 0, new.tokens))
            for admit in self.hooks.admit:
                admit(new)
        grown, asks_for_rows = self._check(asked)
        for row in grown:
            self.pages.follow(row.blocks)
        step, tells = asked, list[Tell]()
        for add_rows in self.hooks.add_rows if asks_for_rows else ():
            if added := add_rows(step):
                step = added.step
                texts += added.texts
                tells.append(added.tell)
        columns = Columns.of(step.seqs)
        for read in self.hooks.read:
            columns.reads += read(columns, asked)
        return NotedStep(asked, step, columns, texts, grown, tells)

    def plan(self, noted: NotedStep, packet: Packet, following: NextBounds = nothing_follows) -> Batch:
        """Send what the device must know of a step."""
        asked, step, columns = noted.asked, noted.step, noted.columns
        staged = self.begin(asked, step, columns, packet)
        writes = () if staged.brings_blocks else self._stage_tables(noted, staged, packet)
        sampled = staged.sampled or self._plan_samples(step.seqs, columns, packet)
        pools = list[Pool]()
        for plan_pools in self.hooks.plan_pools if columns.pooling else ():
            pools += plan_pools(columns, packet)
        packet.send()  # from here on, the tensors made above hold their values
        tables = self._prompt_logprobs(columns) if self.slots.prompt_logprobs else ()
        lay_out = partial(_lay_out, writes, staged) if writes else staged.lay_out
        return Batch(step, asked, staged, sampled, tables, following, lay_out, pools, noted.tells)

    def _check(self, step: StepInput) -> tuple[list[SeqStep], bool]:
        """Return the rows with new blocks, and whether some ask for more positions than they compute.

        Refuse a step that contradicts the tables, before it writes into other sequences.
        """
        slots, grown, more = self.slots, list[SeqStep](), 0
        if not step.seqs:
            raise ValueError(f"step {step.number} has no rows")
        for seq in step.seqs:
            start, end = seq.start, seq.start + seq.count + len(seq.guesses) + seq.proposes
            more += end - start - seq.count
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
            if seq.blocks:
                grown.append(seq)
                if not 0 <= min(seq.blocks) <= max(seq.blocks) <= self.num_blocks:
                    raise ValueError(
                        f"step {step.number} names a cache block beyond the {self.num_blocks} there are"
                    )
        return grown, more > 0

    def _stage_tables(self, noted: NotedStep, staged: Staged, packet: Packet) -> Sequence[Write]:
        """Stage new tokens, new blocks, and the words that the device has added.

        The functions that are returned write them, once the packet is on the device. Tables that the host can
        reach are written at once.
        """
        slots, words = self.slots, list[tuple[ArrayLike, ArrayLike]](staged.words)
        if slots.host_tables:
            if noted.texts or noted.grown:
                noted.write_tables(*slots.host_tables, slots)
        else:
            words += [_new_tokens(noted.texts, slots)] if noted.texts else []
            words += [_new_blocks(noted.grown, slots)] if noted.grown else []
        if not words:
            return ()
        flat, values = (packet.ints(np.concatenate(each)) for each in zip(*words, strict=True))

        def write() -> None:
            slots.words[flat] = values

        return (write,)

    def _plan_samples(self, seqs: list[SeqStep], columns: Columns, packet: Packet) -> SampleTargets | None:
        if not columns.sampling:
            return None
        slots, chosen = self.slots, columns.sampling
        held, flat = [0] * len(chosen), [0] * len(chosen)
        bound: dict[int, list[int]] = {}
        for at, row in enumerate(chosen):
            held[at] = slot = columns.slots[row]
            flat[at] = slot * slots.width + columns.ends[row]
            if seqs[row].bound:
                bound.setdefault(slot, []).append(at)
        last = None
        if len(chosen) < columns.query_starts[-1]:
            last = packet.ints([columns.query_starts[row + 1] - 1 for row in chosen])
        plan = GREEDY
        if not slots.demanding.isdisjoint(held):
            output_index = np.array([seqs[row].output_index for row in chosen], np.int64)
            lengths = np.array([columns.ends[row] for row in chosen])
            bound_rows = set[int]().union(*bound.values())
            rows = SampleRows(np.array(held), lengths, output_index, bound_rows)
            plan = plan_sampling(packet, slots, rows, self.vocab_size)
        return SampleTargets(
            last=last,
            flat=packet.ints(flat),
            rows=chosen,
            plan=plan,
            bound=bound,
            slots=held,
        )

    def _prompt_logprobs(self, columns: Columns) -> list[PromptLogprobPlan]:
        """The output of position p predicts token p + 1, as long as that belongs to the prompt."""
        plans: list[PromptLogprobPlan] = []
        slots = self.slots
        for row, slot in enumerate(columns.slots):
            if slot not in slots.prompt_logprobs:
                continue
            start, first = columns.starts[row], columns.query_starts[row]
            stop = min(columns.ends[row], int(slots.prompt_len[slot]) - 1)
            if start < stop:
                rows, tokens = slice(first, first + stop - start), slice(start + 1, stop + 1)
                plans.append(PromptLogprobPlan(slot, rows, tokens, slots.prompt_logprobs[slot]))
        return plans


def _lay_out(writes: Sequence[Write], staged: Staged) -> StepTokens:
    for write in writes:
        write()
    return staged.lay_out()


def _new_tokens(texts: Sequence[NewTokens], slots: Slots) -> tuple[np.ndarray, list[int]]:
    """Places in the memory of all tables, and the tokens to write there."""
    lengths = np.array([len(text) for _, _, text in texts], np.int64)
    firsts = slots.first_token + np.array([slot * slots.width + at for slot, at, _ in texts], np.int64)
    starts = np.cumsum(lengths) - lengths
    flat = np.arange(lengths.sum()) + np.repeat(firsts - starts, lengths)
    return flat, [token for _, _, text in texts for token in text]


def _new_blocks(grown: Sequence[SeqStep], slots: Slots) -> tuple[list[int], list[int]]:
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
