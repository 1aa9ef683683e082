"""The places of states of a step's rows, as layouts of steps send them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.context import ForwardContext, StateRows
from models.state_rows import STATE_COLUMNS, StateRow, state_columns
from worker.tables.positions import Show
from worker.tables.staging import Packet


@dataclass(frozen=True, slots=True)
class StateReads:
    """The states that a step reads if layers keep some: all recordings have them."""

    rows: Sequence[StateRow]
    in_single: bool = True
    in_mixed: bool = True

    def stage(self, packet: Packet) -> Show:
        table = packet.ints(np.array(state_columns(self.rows)).ravel()).view(-1, len(self.rows))

        def show(context: ForwardContext) -> None:
            if (known := context.states) is None:
                context.states = StateRows(table, self.rows)
                return
            known.table.copy_(table)  # recordings of small steps read it there
            known.host = self.rows

        return show

    def words(self, length: int, nobody: int) -> np.ndarray:
        """The table of `state_columns`, row by row; rows behind these have the states of nobody's slot."""
        table = np.zeros((STATE_COLUMNS, length), np.int32)
        table[:2] = nobody
        table[:2, : len(self.rows)] = np.array([row[:2] for row in self.rows]).T
        for at, row in enumerate(self.rows):
            for index, kept in enumerate(row.kept):
                table[2 + 2 * index : 4 + 2 * index, at] = kept
        return table.ravel()
