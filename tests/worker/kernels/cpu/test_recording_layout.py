"""Steps laid out in C, against the same by torch; and memory for the results of kernels."""

import random
from dataclasses import fields

import pytest
import torch
from kernel_levels import NAMES, library_of
from torch import Tensor

from worker.devices.cpu import Cpu
from worker.kernels.cpu.recording import MOST_TOKENS, Layout
from worker.kernels.cpu.tensors import Memory, allocated_by, empty
from worker.protocol import SeqStep
from worker.tables.positions import Columns, StepTokens, lay_out
from worker.tables.slots import Slots
from worker.tables.staging import Packet

pytestmark = pytest.mark.skipif(not NAMES, reason="there are no C kernels for this processor")

ROWS, LENGTH, BLOCK = 6, 40, 8


def filled(*, paged: bool = True, groups: int = 1) -> Slots:
    slots = Slots(torch.device("cpu"), ROWS, LENGTH, BLOCK, paged=paged, shares=[1] * groups)
    slots.tokens.random_(1000)
    slots.block_tables.random_(1000)
    return slots


def by_torch(columns: Columns, slots: Slots) -> StepTokens:
    packet = Packet(Cpu(1).staging_buffer, words=8)
    finish = lay_out(columns, slots, packet)
    packet.send()
    return finish()


def in_c(layout: Layout, columns: Columns, slots: Slots) -> StepTokens:
    return layout(columns, slots, Packet(Cpu(1).staging_buffer, words=0))()


def assert_same(found: StepTokens, expected: StepTokens) -> None:
    """Compare all but the blocks past those of the longest sequence."""
    (ids, context), (expected_ids, expected_context) = found, expected
    assert torch.equal(ids, expected_ids)
    width = expected_context.block_table.shape[1]
    context.block_table = context.block_table[:, :width]
    for own, others in zip(context.others, expected_context.others, strict=True):
        assert_same((ids, own), (expected_ids, others))
    for field in fields(context):
        one, other = getattr(context, field.name), getattr(expected_context, field.name)
        if field.name == "others":
            continue
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other), field.name
        else:
            assert one == other


def rows(chance: random.Random, *, most: int) -> Columns:
    seqs = []
    for slot in chance.sample(range(ROWS + 1), chance.randint(1, ROWS)):
        count = chance.randint(1, most)
        seqs.append(SeqStep(slot, chance.randint(0, LENGTH - count), count, [], True))
    return Columns.of(seqs)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("most", [1, 2, LENGTH])
def test_any_steps(most: int, groups: int) -> None:
    chance, slots = random.Random(most), filled(groups=groups)
    layout = Layout(library_of(NAMES[0]), slots)
    for _ in range(50):
        columns = rows(chance, most=most)
        assert_same(in_c(layout, columns, slots), by_torch(columns, slots))


def test_without_a_cache() -> None:
    slots = filled(paged=False)
    layout = Layout(library_of(NAMES[0]), slots)
    columns = Columns.of([SeqStep(3, 0, 7, [], False), SeqStep(1, 0, LENGTH, [], False)])
    assert_same(in_c(layout, columns, slots), by_torch(columns, slots))


@pytest.mark.parametrize("paged", [False, True])
def test_small_steps_lie_in_the_same_memory(paged: bool) -> None:
    slots = filled(paged=paged)
    layout = Layout(library_of(NAMES[0]), slots)
    expected_ids, expected = layout.small_batch(LENGTH + 7, 2)
    columns = Columns.of([SeqStep(3, 0, LENGTH, [], False), SeqStep(1, 0, 7, [], False)])
    ids, context = found = in_c(layout, columns, slots)
    assert_same(found, by_torch(columns, slots))
    assert torch.equal(ids, expected_ids)
    assert ids.data_ptr() == expected_ids.data_ptr() == layout.fixed_inputs(1, 1).ids.data_ptr()
    assert context.query_starts.data_ptr() == expected.query_starts.data_ptr()
    assert context.block_table.data_ptr() == expected.block_table.data_ptr()
    many = [SeqStep(row % ROWS, 0, LENGTH, [], False) for row in range(MOST_TOKENS // LENGTH + 1)]
    larger, _ = in_c(layout, Columns.of(many), slots)
    assert larger.data_ptr() != ids.data_ptr()
    assert len(larger) > MOST_TOKENS


def test_memory_is_used_again_when_no_view_of_it_is_left() -> None:
    memory = Memory(torch.zeros(256, dtype=torch.uint8))
    first, second = memory.take(100), memory.take(128)
    assert first is not None and second is not None
    assert memory.take(1) is None
    place, view = first.data_ptr(), first.view(torch.float32)[:3]
    del first
    assert memory.take(100) is None
    del view
    again = memory.take(90)  # as many pieces of 64 bytes
    assert again is not None
    assert again.data_ptr() == place


def test_memory_is_allocated_as_asked() -> None:
    made = torch.zeros(6)
    with allocated_by(lambda shape, dtype: made.view(*shape).to(dtype)):
        assert empty((2, 3), torch.float32).data_ptr() == made.data_ptr()
    fresh = empty((2, 3), torch.bfloat16)
    assert (fresh.shape, fresh.dtype) == ((2, 3), torch.bfloat16)
