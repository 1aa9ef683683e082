"""The layout of a step on CUDA: plans of attention travel with it, once the first has shown the heads."""

# pyright: reportPrivateUsage=false

import random

import pytest
import torch
from interpreted import DEVICE

from models.context import ForwardContext
from models.state_rows import StateRow
from worker.kernels.cuda.attention_plan import Heads, PlannedLayout, launches_of, plan_step
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.steps import step_graphs
from worker.kernels.cuda.steps.layout_kernels import StepTensors, lay_out_splits
from worker.kernels.cuda.steps.mixed_step import MixedStep
from worker.kernels.cuda.steps.step_graphs import ROWS, TOKENS
from worker.tables.positions import Columns, TypeReads
from worker.tables.slots import Slots
from worker.tables.staging import Packet
from worker.tables.state_rows import StateReads

CARD = Card(90, 132)
KEY = (Heads(8, 2, 64), torch.bfloat16, True)


def buffer(words: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(words, dtype=torch.int32), torch.empty(words, dtype=torch.int32, device=DEVICE)


def lay_out(layout: PlannedLayout, starts: list[int], counts: list[int]) -> ForwardContext:
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    query_starts = [sum(counts[:row]) for row in range(len(counts) + 1)]
    slots = Slots(DEVICE, 4, 2000, 16)
    packet = Packet(buffer, 8)  # it must grow
    finish = layout(Columns(list(range(len(starts))), starts, counts, ends, query_starts), slots, packet)
    packet.send()
    return finish()[1]


def test_plans_are_sent_with_every_step_but_the_first() -> None:
    layout = PlannedLayout(CARD)
    first = lay_out(layout, [0], [40])
    assert first.plan == {}
    asked = launches_of(CARD, first, KEY)
    second = lay_out(layout, [40, 0, 900], [1, 300, 1])
    assert second.plan is not None
    sent = second.plan[KEY]
    assert launches_of(CARD, second, KEY) is sent
    assert [len(launch.rows) for launch in asked] == [2]
    assert [launch.rows.tolist() for launch in sent] == [[2, 2, 2, 2, 0], [1] * 10]
    assert [launch.split for launch in sent] == [4, 0]
    assert sent[0].tokens.tolist() == [0x30000, 0x30001, 0x30002, 0x30003, 0]
    assert sent[1].tokens.tolist() == [*range(288, -1, -32)]
    assert lay_out(layout, [0], [1]).plan is not None


@pytest.mark.parametrize("heads", [Heads(8, 2, 64), Heads(64, 8, 64), Heads(16, 1, 576, 128)])
def test_single_tokens_are_split_on_the_device_as_on_the_host(heads: Heads) -> None:
    drawn, key = random.Random(1), (heads, torch.bfloat16, True)
    layout = PlannedLayout(CARD)
    layout._last = {key: []}
    for rows in (1, 3, 40, 512) * 2:
        lengths = [drawn.choice([2, 700, 9000, 1 << 20]) for _ in range(rows)]
        plan = layout.room_for(rows, 1 << 20, DEVICE)
        lay_out_splits(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), plan, CARD.processors)
        ((blocks, _),) = plan_step(CARD, key, [1] * rows, lengths)
        (made,) = plan[key]
        count = len(blocks.rows)
        assert (made.rows[:count].tolist(), made.rows[count:].tolist()) == (
            blocks.rows.tolist(),
            [-1] * (len(made.rows) - count),
        )
        assert made.tokens[:count].tolist() == blocks.tokens.tolist()


def test_tensors_of_a_packet_begin_where_kernels_expect_them() -> None:
    packet = Packet(buffer, 64)
    pieces = [packet.ints([1] * count) for count in (1, 5, 4, 3)] + [packet.floats([0.5])]
    packet.send()
    assert {piece.data_ptr() % 16 for piece in pieces} == {pieces[0].data_ptr() % 16}
    assert [piece.tolist() for piece in pieces] == [[1], [1] * 5, [1] * 4, [1] * 3, [0.5]]


@pytest.mark.parametrize("paged", [True, False])
def test_the_largest_graph_of_a_model_with_the_widest_heads_has_room_in_a_form(paged: bool) -> None:
    """Its blocks hold two tokens each, as 16 heads of 512 numbers share a key; other heads are narrower."""
    kinds = [(Heads(64, 4, dim), torch.bfloat16, paged) for dim in (512, 128)]
    slots = Slots(DEVICE, ROWS[-1], 8192, 64, paged=paged)
    slots.rooms["states"] = 1
    largest = StepTensors.make(DEVICE, TOKENS[-1], ROWS[-1], slots.most_blocks)
    form = torch.zeros(step_graphs._FORM_WORDS, dtype=torch.int32, device=DEVICE)
    step = MixedStep(TOKENS[-1], ROWS[-1], CARD, slots, kinds, form, largest)
    assert (step.rows, step.samples) == (512, 64)
    counts = [TOKENS[-1] - 511, *[1] * 511]
    ends = [8000] * 512
    starts = [end - count for end, count in zip(ends, counts, strict=True)]
    query_starts = [sum(counts[:row]) for row in range(513)]
    columns = Columns(list(range(512)), starts, counts, ends, query_starts)
    columns.reads.append(StateReads([StateRow(row, row) for row in range(512)]))
    packet = Packet(buffer, 8)
    columns.reads.append(TypeReads([0] * TOKENS[-1]))
    step.stage(columns, range(64), packet)
    packet.send()
