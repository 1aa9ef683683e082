"""The rules of Whisper's answers with timestamps, from the table of tokens on the device.

Timestamps come in pairs around text and never fall; the first token of an answer is one. Where all of them
together are likelier than any other token, only they remain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.protocol import Timestamps
from worker.tables.slots import SampleRows, Slots
from worker.tables.staging import Packet


@dataclass(frozen=True, slots=True)
class TimestampRules:
    """Rows of a step to which the same rules apply."""

    rules: Timestamps
    rows: Tensor  # [A]
    slots: Tensor  # [A]
    lengths: Tensor  # [A] tokens before the new one
    made: Tensor  # [A] how many of them are of the answer

    def apply(self, logits: Tensor, tokens: Tensor) -> None:
        """Forbid tokens in the logits [R, V], in place."""
        first, rows = self.rules.first, self.rows.long()
        own = logits[rows]  # [A, V]
        own.masked_fill_(self._forbidden(own.shape[1], tokens), -torch.inf)
        stamps, others = own[:, first:].logsumexp(-1), own[:, :first].amax(-1)
        own[:, :first].masked_fill_((stamps > others).unsqueeze(1), -torch.inf)
        logits[rows] = own

    def _forbidden(self, vocab_size: int, tokens: Tensor) -> Tensor:
        """The tokens [A, V] that may not come next."""
        rules, made = self.rules, self.made.unsqueeze(1)  # [A, 1], as all below
        ids = torch.arange(vocab_size, device=tokens.device)
        last, before = self._is_stamp(tokens, 1), self._is_stamp(tokens, 2) | (made < 2)
        latest = self._latest(tokens)
        lowest = torch.where(last & ~before, latest, latest + 1)
        forbidden = (ids == rules.none) | (last & before & (ids >= rules.first))
        forbidden |= last & ~before & (ids < rules.end)
        forbidden |= (ids >= rules.first) & (ids < lowest)
        wrong = ids < rules.first
        if rules.most_first is not None:
            wrong |= ids > rules.first + rules.most_first
        return forbidden | ((made == 0) & wrong)

    def _is_stamp(self, tokens: Tensor, back: int) -> Tensor:
        """Whether the token so far back is a timestamp of the answer."""
        found = tokens[self.slots.long(), (self.lengths - back).clamp(min=0).long()]
        return ((found >= self.rules.first) & (self.made >= back)).unsqueeze(1)

    def _latest(self, tokens: Tensor) -> Tensor:
        """The last timestamp of the answer, the largest; one less than the first if there is none."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        begin, end = (self.lengths - self.made).unsqueeze(1), self.lengths.unsqueeze(1)
        answer = tokens[self.slots.long()].where((places >= begin) & (places < end), 0)
        return answer.amax(-1, keepdim=True).clamp(min=self.rules.first - 1)


def plan_timestamps(packet: Packet, slots: Slots, rows: SampleRows) -> Iterator[TimestampRules]:
    """Plan the rules of rows that have some."""
    by_rules: dict[Timestamps, list[int]] = {}
    for row, slot in enumerate(rows.slots):
        if (rules := slots.params[slot].timestamps) is not None:
            by_rules.setdefault(rules, []).append(row)
    for rules, chosen in by_rules.items():
        held, lengths, made = (each[chosen] for each in (rows.slots, rows.lengths, rows.output_index))
        yield TimestampRules(rules, *(packet.ints(each) for each in (chosen, held, lengths, made)))
