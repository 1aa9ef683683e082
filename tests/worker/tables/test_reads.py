"""What a step reads beside tokens is shown where a recording reads it, or else as it comes."""

from __future__ import annotations

import torch
from torch import Tensor

from models.context import AdapterRows, ForwardContext, StateRows
from models.state_rows import STATE_COLUMNS, StateRow
from worker.tables.adapter_rows import AdapterReads
from worker.tables.positions import Columns, TypeReads
from worker.tables.staging import Packet
from worker.tables.state_rows import StateReads


def step() -> ForwardContext:
    none = torch.empty(0, dtype=torch.int32)
    return ForwardContext(none, none, none, none, none, 1, [], [])


def buffer(words: int) -> tuple[Tensor, Tensor]:
    made = torch.zeros(words, dtype=torch.int32)
    return made, made


def test_reads_are_shown_in_the_places_of_recordings_and_else_as_they_come() -> None:
    states, adapters = StateReads([StateRow(3, 0), StateRow(1, 1)]), AdapterReads([(7, 1, 2)], 3)
    recorded, plain, packet = step(), step(), Packet(buffer, 64)
    table, numbers = torch.zeros(STATE_COLUMNS, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    recorded.states = StateRows(table, [])
    recorded.adapters = AdapterRows(numbers, torch.zeros(10, dtype=torch.int32), [])
    for context in (recorded, plain):
        for read in (states, adapters, TypeReads([0, 1, 1])):
            read.stage(packet)(context)
        assert context.states is not None and context.adapters is not None
        assert context.states.table[:2].tolist() == [[3, 1], [0, 1]]
        assert context.adapters.numbers.tolist() == [0, 7, 7]
        assert context.adapters.runs[:4].tolist() == [1, 7, 1, 2]
        assert (context.states.host, context.adapters.host) == (states.rows, adapters.runs)
        assert context.token_types is not None and context.token_types.tolist() == [0, 1, 1]
    assert table[0].tolist() == [3, 1] and numbers.tolist() == [0, 7, 7]
    assert plain.states is not recorded.states


def test_a_kind_of_read_is_found_among_all() -> None:
    columns = Columns([0], [0], [1], [1], [0, 1], reads=[TypeReads([0])])
    assert columns.find(TypeReads) is columns.reads[0]
    assert columns.find(StateReads) is None
