"""The steps that are sent as forms, and the place of a form on the device."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from worker.capacity import WorkerLimits
from worker.features.speculation.draft_rows import Speculation
from worker.kernels.cuda.steps.recorded_forms import LENGTH, Form, SlotProgress, StagedForm, begin_step
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput
from worker.steps.batch import Batch
from worker.steps.feature import Hooks
from worker.steps.planner import StepPlanner
from worker.tables.positions import Columns, lay_out
from worker.tables.slots import Slots
from worker.tables.staging import Packet

CPU = torch.device("cpu")
GREEDY = Sampling(max_tokens=9, temperature=0)


class Recorded:
    """Recordings of steps of four rows."""

    chooses = draws = True
    lay_out = staticmethod(lay_out)
    chosen: list[int] | None = None
    """The rows whose tokens a recording was to choose in the last step that was no form."""

    def __init__(self, *shares: int) -> None:
        self.slots = Slots(CPU, 4, 20, block_size=4, shares=shares or (1,))
        self.slots.host_tables = None
        self.progress = SlotProgress(self.slots)
        guesses = Speculation(takes_some=True, drafts=0, samples=True)
        guesses.open(WorkerLimits(4, 4, 64, 20), self.slots, 20)
        self.hooks = Hooks([guesses])
        self.buffer = torch.zeros(64, dtype=torch.int32)
        self.packet = Packet(buffers, 64)

    def find(self, rows: int, *, whole: bool, adapted: bool) -> Form | None:
        return Form(4, whole) if rows <= 4 else None

    def stage_mixed(self, columns: Columns, sampling: Sequence[int], packet: Packet) -> None:
        """Have none."""
        self.chosen = list(sampling)

    def step(self, seqs: list[SeqStep], *new: NewSeq, fresh: bool = False) -> Batch:
        self.packet.reset()
        planner = StepPlanner(self.slots, 20, 100, self.hooks, partial(begin_step, self, self.slots))
        batch = planner.plan(planner.note(StepInput(1, list(new), seqs, fresh)), self.packet)
        if form_of(batch) is None:
            batch.lay_out()
        return batch


def form_of(batch: Batch) -> object:
    return batch.staged.form if isinstance(batch.staged, StagedForm) else None


def buffers(words: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(words, dtype=torch.int32), torch.zeros(words, dtype=torch.int32)


@pytest.fixture
def recorded() -> Recorded:
    """Two sequences of 3 tokens, which have sampled one."""
    made = Recorded()
    new = [NewSeq(slot, [5, 6, 7], 3, GREEDY) for slot in (0, 2)]
    assert form_of(made.step([SeqStep(slot, 0, 3, [slot], True) for slot in (0, 2)], *new)) is None
    assert made.progress.table[[0, 2], LENGTH].tolist() == [3, 3]
    return made


def next_rows(at: int, blocks: list[int] | None = None, **changed: Any) -> list[SeqStep]:
    given = {"samples": True, "output_index": at - 2, **changed}
    return [SeqStep(slot=slot, start=at, count=1, blocks=blocks or [], **given) for slot in (0, 2)]


def test_a_form_is_filled_up_and_lies_where_it_always_does(recorded: Recorded) -> None:
    assert form_of(recorded.step(next_rows(3))) == Form(4, whole=True)
    assert recorded.buffer[:12].tolist() == [0, 2, 4, 4, -1, -1, -1, -1, 0, 0, 0, 0]
    assert form_of(recorded.step(next_rows(4, [9]))) == Form(4, whole=True)
    assert recorded.buffer[:12].tolist() == [0, 2, 4, 4, 1, 1, -1, -1, 9, 9, 0, 0]
    assert recorded.slots.blocks[:3] == [2, 0, 2]


def test_a_form_has_a_block_for_each_group() -> None:
    recorded = Recorded(1, 2)
    new = [NewSeq(slot, [5, 6, 7, 8], 4, GREEDY) for slot in (0, 2)]
    recorded.step([SeqStep(slot, 0, 4, [slot, 3 + slot], True) for slot in (0, 2)], *new)
    rows = [SeqStep(slot, 4, 1, [9, slot], True, 1) for slot in (0, 2)]
    assert form_of(recorded.step(rows)) == Form(4, whole=True)
    assert recorded.buffer[4:16].tolist() == [1, 1, -1, -1, 9, 9, 0, 0, 0, 4, 0, 0]
    assert recorded.slots.blocks[:3] == [2, 0, 2]


@pytest.mark.parametrize(
    "seqs",
    [
        next_rows(3, samples=False),
        next_rows(2, output_index=0),
        next_rows(3, output_index=3),
        next_rows(3, [9, 10]),
    ],
    ids=["no sample", "another length", "another number of tokens", "two blocks"],
)
def test_other_steps_are_sent_as_they_are(recorded: Recorded, seqs: list[SeqStep]) -> None:
    assert form_of(recorded.step(seqs)) is None


def test_a_step_that_brings_a_sequence_is_sent_as_it_is(recorded: Recorded) -> None:
    new = NewSeq(1, [5], 1, GREEDY)
    assert form_of(recorded.step([*next_rows(3), SeqStep(1, 0, 1, [7], True)], new)) is None


def test_bounds_and_logprobs_end_a_form_with_the_logits(recorded: Recorded) -> None:
    assert form_of(recorded.step(next_rows(3, bound=True))) == Form(4, whole=False)
    asks = NewSeq(1, [5, 6, 7], 3, Sampling(max_tokens=9, logprobs=1))
    recorded.step([SeqStep(1, 0, 3, [7], True)], asks)
    batch = recorded.step([*next_rows(4, [9]), SeqStep(1, 3, 1, [], True, 1)])
    assert form_of(batch) == Form(4, whole=False)
    assert batch.sampled is not None
    assert batch.sampled.flat.tolist() == [5, 2 * 21 + 5, 21 + 4]


def test_nothing_is_believed_after_a_failed_step(recorded: Recorded) -> None:
    assert form_of(recorded.step(next_rows(3))) is not None
    assert form_of(recorded.step(next_rows(4, [9]), fresh=True)) is None
    assert form_of(recorded.step(next_rows(5))) is not None, "the step before told what holds"


def test_guesses_are_sent_as_they_are_and_nobody_knows_how_many_hold(recorded: Recorded) -> None:
    """The recording would count the tokens of a slot in the table, for each of its rows the same."""
    guessing = SeqStep(0, 3, 1, [5], True, 1, guesses=[8, 9])
    assert form_of(recorded.step([guessing, SeqStep(2, 3, 1, [], True, 1)])) is None
    assert recorded.chosen == []
    assert recorded.slots.tokens[0, 4:6].tolist() == [8, 9]
    assert recorded.slots.blocks[:3] == [2, 0, 1]
    assert form_of(recorded.step([SeqStep(2, 4, 1, [9], True, 2)])) == Form(4, whole=True), "others are known"
    next_step = [SeqStep(0, 5, 1, [], True, 3)]
    assert form_of(recorded.step(next_step)) is None
    assert recorded.chosen == [0]
    assert form_of(recorded.step([SeqStep(0, 6, 1, [], True, 4)])) == Form(4, whole=True)
