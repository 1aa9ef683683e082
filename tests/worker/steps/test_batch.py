"""The flat tensors that models read, made from a step's slots and counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laid_out import BLOCKS, Table

from worker.devices.cpu import Cpu
from worker.protocol import NewSeq, Sampling, SeqStep
from worker.tables.slots import Slots
from worker.tables.staging import Packet, Staging

GREEDY = Sampling(max_tokens=9, temperature=0)


@pytest.fixture(params=["written by the host", "sent to a device"], autouse=True)
def tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """New tokens and blocks reach the tables in one of two ways. The device is the host in both."""
    if request.param == "sent to a device":
        make = Slots.__init__

        def made(self: Slots, *args: Any, **options: Any) -> None:
            make(self, *args, **options)
            self.host_tables = None

        monkeypatch.setattr(Slots, "__init__", made)


def new(slot: int, tokens: list[int], prompt_len: int | None = None, params: Sampling = GREEDY) -> NewSeq:
    return NewSeq(slot=slot, tokens=tokens, prompt_len=prompt_len or len(tokens), params=params)


def seq(slot: int, start: int, count: int, blocks: list[int] | None = None, samples: bool = True) -> SeqStep:
    return SeqStep(slot=slot, start=start, count=count, blocks=blocks or [], samples=samples)


def test_dtypes_are_those_of_the_contract() -> None:
    context = Table().step(seq(0, 0, 1, [5]), new=[new(0, [1])]).context
    assert context.positions.dtype == context.slot_mapping.dtype == torch.int64
    assert context.query_starts.dtype == context.kv_lens.dtype == context.block_table.dtype == torch.int32


@pytest.mark.parametrize(
    "wrong",
    [
        seq(0, 2, 3),  # five tokens, one block of four
        seq(0, 20, 1, [2, 3, 4, 5]),  # beyond the slot
        seq(0, 2, 0),
        seq(0, 2, 1, [2, 3, 4, 5, 6]),  # six blocks, a slot has five
        seq(0, 2, 1, [BLOCKS + 1]),
        seq(0, 2, 1, [-1]),
    ],
)
def test_plans_that_contradict_the_tables_change_nothing(wrong: SeqStep) -> None:
    table = Table()
    table.step(seq(0, 0, 2, [1]), seq(1, 0, 2, [8]), new=[new(0, [1, 2]), new(1, [3, 4])])
    before = table.slots.block_table.clone(), list(table.slots.blocks)
    with pytest.raises(ValueError, match="step 2"):
        table.step(wrong)
    assert (table.slots.block_table == before[0]).all()
    assert table.slots.blocks == before[1]


@pytest.mark.parametrize("bad", [new(5, [1]), new(-1, [1]), new(0, []), new(0, [1] * 21)])
def test_sequences_that_fit_no_slot_are_refused(bad: NewSeq) -> None:
    with pytest.raises(ValueError, match=r"slot"):
        Table().step(seq(0, 0, 1, [1]), new=[bad])


def test_an_empty_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        Table().step()


class TwoSided(Cpu):
    """A device whose memory is not the host's, like CUDA's."""

    def staging_buffer(self, words: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(words, dtype=torch.int32), torch.zeros(words, dtype=torch.int32)


@pytest.mark.parametrize("device", [Cpu(1), TwoSided(1)])
def test_a_packet_brings_everything_even_when_it_grows(device: Cpu) -> None:
    packet = Packet(device.staging_buffer, words=4)
    for _ in range(2):  # the second time in the larger buffer
        packet.reset()
        parts = [packet.ints([1, 2, 3]), packet.ints(range(100)), packet.ints([])]
        floats = packet.floats([0.5, -1.25])
        packet.send()
        assert [part.tolist() for part in parts] == [[1, 2, 3], list(range(100)), []]
        assert floats.tolist() == [0.5, -1.25]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_buffers_of_the_steps_ahead_are_left_alone(ahead: int) -> None:
    staging = Staging(Cpu(1).staging_buffer, ahead, words=4)
    flying = [staging.open().ints([step]) for step in range(ahead + 1)]
    assert [part.tolist() for part in flying] == [[step] for step in range(ahead + 1)]
