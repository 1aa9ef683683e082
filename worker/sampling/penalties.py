"""Penalties: repetition over prompt and output, then frequency and presence over the output.

The tokens are read from the device's table, which also has those that the host has not seen yet. The work
grows with the length of the text and not with the vocabulary: only logits of tokens that occurred change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.sampling.grouped_logits import in_slices
from worker.tables.slots import SampleRows, Slots
from worker.tables.staging import Packet

MOST_TOKENS = 1 << 22
"""Rows whose texts are longer than this together are treated one slice after the other."""


@dataclass(frozen=True, slots=True)
class Penalties:
    rows: Tensor  # [P, 1]
    slots: Tensor  # [P, 1]
    lengths: Tensor  # [P, 1] of prompt and output
    counted: Tensor  # [P, 1] of the newest tokens that are penalised: all, but for prompts of embeddings
    outputs: Tensor  # [P, 1] of the output
    repetition: Tensor  # [P, 1]
    frequency: Tensor  # [P, 1]
    presence: Tensor  # [P, 1]
    longest: int
    longest_output: int

    def apply(self, logits: Tensor, tokens: Tensor) -> None:
        """Change the logits in place. Several writes to one logit write the same value, in any order."""
        flat = logits.view(-1)
        ages = torch.arange(1, self.longest + 1, device=logits.device)  # [L] 1 is the newest token
        indices = self._indices(tokens, ages, logits.shape[1])  # [P, L]
        values = flat[indices]
        flat[indices] = torch.where(values > 0, values / self.repetition, values * self.repetition)
        if self.longest_output:
            self._count(flat, indices[:, : self.longest_output], ages[: self.longest_output])

    def _count(self, flat: Tensor, indices: Tensor, ages: Tensor) -> None:
        amounts = torch.where(ages <= self.outputs, -self.frequency, 0.0)  # [P, O]
        flat.index_add_(0, indices.reshape(-1), amounts.reshape(-1))
        newest = torch.minimum(ages, self.outputs.clamp(min=1))  # beyond the output: its first token again
        seen = indices.gather(1, newest - 1)  # [P, O]
        flat[seen] -= torch.where(self.outputs > 0, self.presence, 0.0)

    def _indices(self, tokens: Tensor, ages: Tensor, vocab_size: int) -> Tensor:
        """The flat index of the logit of a row's token of each age; beyond the text, of its first token."""
        positions = self.lengths - torch.minimum(ages, self.counted)  # [P, L]
        return self.rows * vocab_size + tokens[self.slots, positions]


def plan_penalties(packet: Packet, slots: Slots, rows: SampleRows) -> list[Penalties]:
    penalised = np.flatnonzero(slots.penalised[rows.slots])
    if not len(penalised):
        return []
    size = max(1, MOST_TOKENS // int(rows.lengths[penalised].max()))
    return [_plan_slice(packet, slots, rows, part) for part in in_slices(penalised, size)]


def _plan_slice(packet: Packet, slots: Slots, rows: SampleRows, chosen: np.ndarray) -> Penalties:
    held = rows.slots[chosen]
    lengths, outputs = rows.lengths[chosen], rows.output_index[chosen]
    counted = lengths - slots.without_tokens[held]
    params = [slots.params[slot] for slot in held]
    factors = [each.repetition_penalty if n else 1.0 for each, n in zip(params, counted, strict=True)]
    return Penalties(
        *(packet.ints(each)[:, None] for each in (chosen, held, lengths, counted.clip(1), outputs)),
        repetition=packet.floats(factors)[:, None],
        frequency=packet.floats([each.frequency_penalty for each in params])[:, None],
        presence=packet.floats([each.presence_penalty for each in params])[:, None],
        longest=int(lengths.max()),
        longest_output=int(outputs.max()),
    )
