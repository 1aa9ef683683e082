"""Beam searches between two steps: answers are forked, and tokens that the engine has chosen written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from worker.protocol import BeamToken
from worker.tables.slots import Slots

CopyStates = Callable[[Tensor, Tensor], None]
"""The type of a function that copies the states of some slots [N] to others [N]."""


def continue_beams(
    beams: Sequence[BeamToken], slots: Slots, parts: Sequence[Tensor], copy_states: CopyStates | None
) -> None:
    """Let answers go on from those of other slots, and write the tokens with which all go on.

    `parts` [blocks, ...] are those of the cache: what a block holds lies at its number in each of them.
    """
    device = slots.tokens.device
    if copies := [pair for beam in beams for pair in beam.copies]:
        before, behind = _on_device(copies, device).unbind(1)
        for part in parts:
            data = part.view(torch.uint8) if part.itemsize == 1 else part  # types of 8 bits cannot be indexed
            data[behind] = data[before]
    if forks := [beam for beam in beams if beam.source != beam.slot]:
        for beam in forks:
            slots.fork(beam.source, beam.slot, beam.at // slots.block_size)
        source, target = _on_device([(beam.source, beam.slot) for beam in forks], device).unbind(1)
        slots.block_tables[:, target] = slots.block_tables[:, source]
        if copy_states is not None:
            copy_states(source, target)
    held, at, tokens = _on_device([(beam.slot, beam.at, beam.token) for beam in beams], device).unbind(1)
    slots.tokens[held, at] = tokens.int()


def _on_device(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The same numbers [rows, columns] on a device, for which nobody waits."""
    host = torch.tensor(rows, dtype=torch.int64)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
