"""The layout of a step on CUDA: plans of attention travel with it, once the first has shown the heads."""

from __future__ import annotations

import torch
from interpreted import DEVICE

from models.context import ForwardContext
from worker.kernels.cuda.attention_plan import Heads, launches_of
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.steps.attention_plans import PlannedLayout
from worker.tables.positions import Columns
from worker.tables.slots import Slots
from worker.tables.staging import Packet

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
    assert [launch.rows.tolist() for launch in sent] == [[0, 2], [1] * 10]
    assert sent[1].tokens.tolist() == [*range(288, -1, -32)]
    assert lay_out(layout, [0], [1]).plan is not None


def test_tensors_of_a_packet_begin_where_kernels_expect_them() -> None:
    packet = Packet(buffer, 64)
    pieces = [packet.ints([1] * count) for count in (1, 5, 4, 3)] + [packet.floats([0.5])]
    packet.send()
    assert {piece.data_ptr() % 16 for piece in pieces} == {pieces[0].data_ptr() % 16}
    assert [piece.tolist() for piece in pieces] == [[1], [1] * 5, [1] * 4, [1] * 3, [0.5]]
