"""Plans steps: a step as the engine sees it becomes a batch as the device computes it.

This is the only code that knows both layouts: `StepInput`, lists of slots and counts, and the flat tensors of
packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from worker.media import StepMedia
from worker.pooling import PoolPlan, RowChoice, plan_pools, segments_of, with_pieces
from worker.protocol import SeqStep, StepInput
from worker.sampling.logprobs import PromptLogprobPlan
from worker.sampling.sampler import GREEDY, SampleTargets, plan_sampling
from worker.steps.guesses import give_rows, may_guess, state_rows
from worker.tables.positions import Columns, LayOut, StepTokens, lay_out
from worker.tables.recorded_forms import Form, Forms, MixedForm, StagedForm, can_choose, find_form, send_form
from worker.tables.slots import SampleRows, Slots
from worker.tables.staging import Packet


@dataclass(frozen=True, slots=True)
class Batch:
    """All that the device must be told of a step, on the way there."""

    step: StepInput
    """The step in which each guess has a row of its own."""
    asked: StepInput
    """The step as the engine has sent it: the same one if nothing is guessed."""
    lay_out: Callable[[], StepTokens]
    """The function that writes the tables and lays the tokens out, on the device. It is called once."""
    sampled: SampleTargets | None
    prompt_logprobs: list[PromptLogprobPlan]
    pooled: PoolPlan | None
    form: Form | MixedForm | None = None
    """The recorded form in which the step is sent. It is laid out, then, by the recording."""
    queries: list[Tensor] | None = None
    """Gets what layers of cross-attention give out, if some texts are compared with their sources."""


@dataclass(frozen=True, slots=True)
class StepPlanner:
    """Plans the steps of one worker, for its tables."""

    slots: Slots
    num_blocks: int
    vocab_size: int
    pooler: RowChoice
    lay_out: LayOut = lay_out
    forms: Forms | None = None
    media: StepMedia | None = None
    """What reads the media of steps, and what prompts see; None: the model has text only."""

    def plan(self, asked: StepInput, packet: Packet) -> Batch:
        """Note the step's new sequences and blocks, and send what the device must know of it."""
        for new in asked.new:
            self.slots.admit(new)
        self._check(asked)
        step = give_rows(asked)
        remembered = self.slots.first_remembered
        states = None if remembered is None else state_rows(asked.seqs, remembered)
        columns = Columns.of(step.seqs, states)
        self.slots.bring_adapters(columns.slots)
        types, seen = self._token_types(columns), self._seen_tokens(columns)
        queries = None if self.slots.aligned.isdisjoint(columns.slots) else list[Tensor]()
        has_media = self.media is not None and (self.slots.media or self.media.sees_prompts)
        media = self.media.read(columns) if self.media is not None and has_media else None
        staged, forms = None, self.forms
        if forms is not None and step.fresh:
            forms.states.forget()
        may_replay = step is asked and not step.new and (media is None or media.only_shifts)
        form = find_form(forms, step.seqs, columns, self.slots) if forms is not None and may_replay else None
        if forms is not None and form is not None:
            return self._plan_form(forms, form, step, columns, packet)
        if forms is not None and media is None and seen is None and queries is None:
            staged = self._stage_mixed(forms, step.seqs, columns, types, packet)

        write_tables = self._stage_tables(asked, packet)
        finish = self.lay_out(columns, self.slots, packet) if staged is None else staged.finish
        token_types = packet.ints(types) if types is not None and staged is None else None
        shown = [] if media is None else [media.stage(packet)]
        if self.slots.sources is not None:
            shown.append(self.slots.sources.stage(columns, packet, queries))
        if forms is not None and staged is not None and staged.form.whole:
            sampled = _sampled_by(forms, step.seqs)
        else:
            sampled = self._plan_samples(step.seqs, columns, packet)
        pooled = self._plan_pools(step.seqs, columns, packet)
        packet.send()  # from here on, the tensors made above hold their values

        def lay_tokens_out() -> StepTokens:
            write_tables()
            ids, context = finish()
            if token_types is not None:
                context.token_types = token_types.long()
            context.seen = seen
            for show in shown:
                show(context)
            return ids, context

        form, tables = None if staged is None else staged.form, self._prompt_logprobs(columns)
        return Batch(step, asked, lay_tokens_out, sampled, tables, pooled, form, queries)

    def _check(self, step: StepInput) -> None:
        """Refuse a step that contradicts the tables, before it writes into other sequences."""
        slots = self.slots
        if not step.seqs:
            raise ValueError(f"step {step.number} has no rows")
        guesses = 0
        for seq in step.seqs:
            guesses += len(seq.guesses) if seq.guesses else 0
            start, end = seq.start, seq.start + seq.tokens + seq.proposes
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
            if (seq.guesses or seq.proposes) and not (slots.paged and slots.most_guesses and may_guess(seq)):
                raise ValueError(f"step {step.number}: nothing can be guessed behind {seq}")
            if seq.blocks and not 0 <= min(seq.blocks) <= max(seq.blocks) <= self.num_blocks:
                raise ValueError(
                    f"step {step.number} names a cache block beyond the {self.num_blocks} there are"
                )
        if guesses > slots.most_guesses:
            raise ValueError(f"step {step.number} has {guesses} guesses, of {slots.most_guesses} at most")

    def _stage_mixed(
        self, forms: Forms, seqs: Sequence[SeqStep], columns: Columns, types: list[int] | None, packet: Packet
    ) -> StagedForm | None:
        sampling = [row for row, seq in enumerate(seqs) if seq.samples]
        if not can_choose(forms, [seqs[row] for row in sampling], self.slots):
            sampling = []
        return forms.stage_mixed(columns, types, sampling, packet)

    def _plan_form(
        self, forms: Forms, form: Form, step: StepInput, columns: Columns, packet: Packet
    ) -> Batch:
        """Send a step as a form, and behind it what sampling needs if the recording ends with the logits."""
        send_form(forms, form, step.seqs, columns, self.slots, packet)
        if form.whole:
            sampled = _sampled_by(forms, step.seqs)
        else:
            sampled = self._plan_samples(step.seqs, columns, packet)
        packet.send()
        return Batch(step, step, _not_laid_out, sampled, [], None, form)

    def _stage_tables(self, step: StepInput, packet: Packet) -> Callable[[], None]:
        """Stage new tokens, new blocks, and what recordings must know of sequences that are not to be pooled.

        The returned function writes them, once the packet is on the device. Tables that the host can reach
        are written at once.
        """
        slots = self.slots
        guessing = [seq for seq in step.seqs if seq.guesses]
        texts: list[_Text] = [(new.slot, 0, new.tokens) for new in step.new]
        texts += [(seq.slot, seq.start + seq.count, seq.guesses) for seq in guessing]
        grown = [seq for seq in step.seqs if seq.blocks]
        staged: list[tuple[ArrayLike, ArrayLike]] = []
        if slots.host_tables is not None:
            _write_tables(*slots.host_tables, texts, grown, slots)
        else:
            staged += [_new_tokens(texts, slots)] if texts else []
            staged += [_new_blocks(grown, slots)] if grown else []
        sampling = [seq for seq in step.seqs if slots.pooling[seq.slot] is None and not seq.guesses]
        if self.forms is not None and guessing:  # how many hold is known to nobody yet
            self.forms.states.forget([seq.slot for seq in guessing])
        if self.forms is not None and sampling:
            staged.append(self.forms.states.after(sampling))
        if not staged:
            return lambda: None
        flat, words = (packet.ints(np.concatenate(each)) for each in zip(*staged, strict=True))

        def write() -> None:
            slots.words[flat] = words

        return write

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

    def _plan_pools(self, seqs: list[SeqStep], columns: Columns, packet: Packet) -> PoolPlan | None:
        aligned = self.slots.aligned
        chosen = [row for row, seq in enumerate(seqs) if seq.pools and seq.slot not in aligned]
        if not chosen:
            return None
        held = [columns.slots[row] for row in chosen]
        asked = [params for slot in held if (params := self.slots.pooling[slot]) is not None]
        if len(asked) < len(chosen):
            raise ValueError("a step pools a sequence that was not admitted for it")
        texts = [self.slots.texts[slot] for slot in held]
        needed = [
            self.pooler.needed_positions(params, text) for params, text in zip(asked, texts, strict=True)
        ]
        if not any(columns.starts) and [len(own) for own in needed] == columns.counts:  # an encoder's texts
            segments = segments_of(packet, columns.counts, asked)
            plan = PoolPlan(chosen, asked, segments, None, texts)
        else:
            plan = plan_pools(packet, columns, chosen, asked, needed, texts)
        if any(params.outputs or params.spans for params in asked):
            return with_pieces(plan, packet, self.pooler)
        return plan

    def _token_types(self, columns: Columns) -> list[int] | None:
        """The type of each token: 1 in the second text of a pair, else 0. None if all are 0."""
        if self.slots.paged:
            return None
        pooling = self.slots.pooling
        begins = [params.second_at if (params := pooling[slot]) else 0 for slot in columns.slots]
        if not any(begins):
            return None
        lengths = zip(begins, columns.counts, strict=True)  # a text is computed whole
        return [int(0 < second <= at) for second, count in lengths for at in range(count)]

    def _seen_tokens(self, columns: Columns) -> list[int] | None:
        """The first tokens of each text that others see; None if those are all."""
        if self.slots.paged:
            return None
        pooling = self.slots.pooling
        unseen = [params.unseen if (params := pooling[slot]) else 0 for slot in columns.slots]
        if not any(unseen):
            return None
        return [count - few for count, few in zip(columns.counts, unseen, strict=True)]

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


def _not_laid_out() -> StepTokens:
    raise ValueError("a step was sent as a form, and nobody replays it")


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
