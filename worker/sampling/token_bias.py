"""Tokens that requests forbid or favour: allowed_token_ids, bad_words, min_tokens and suppressed ids,
logit_bias, in this order.

Where these options leave no token of those within a row's bounds, the bounds win. Masks are planned on the
host as flat indices in the logits (row * vocabulary + id), for rows that use them only. Bad words are matched
on the device, because the tokens before the new one may still be in flight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.protocol import Sampling
from worker.tables.slots import SampleRows, Slots
from worker.tables.staging import Packet

NEVER = -torch.inf
ANY = -1
"""The stand-in for any token, with which short prefixes are filled up on the left."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """The only tokens that are allowed in some rows."""

    rows: Tensor  # [A]
    flat: Tensor  # [I] flat indices in the logits

    def apply(self, logits: Tensor) -> None:
        every, flat = logits.view(-1), self.flat.long()
        allowed = every[flat]
        logits.index_fill_(0, self.rows.long(), NEVER)
        every[flat] = allowed


@dataclass(frozen=True, slots=True)
class BadWords:
    """The last token of word w is forbidden when the output ends with the tokens before it."""

    prefixes: Tensor  # [W, K]
    slots: Tensor  # [W]
    lengths: Tensor  # [W]
    flat: Tensor  # [W] flat indices of the last tokens in the logits

    def apply(self, logits: Tensor, tokens: Tensor) -> None:
        width = self.prefixes.shape[1]
        back = torch.arange(-width, 0, device=logits.device)  # [K]
        tail = tokens[self.slots[:, None], (self.lengths[:, None] + back).clamp_(min=0)]  # [W, K]
        completes = ((self.prefixes == ANY) | (self.prefixes == tail)).all(1)  # [W]
        logits.view(-1).index_add_(0, self.flat, torch.where(completes, NEVER, 0.0))


@dataclass(frozen=True, slots=True)
class Masks:
    allowed: Allowed | None
    bad_words: BadWords | None
    shifted: Tensor  # [I] flat indices of the tokens of min_tokens and logit_bias
    shifts: Tensor  # [I]
    guarded: Tensor  # [G] rows that may be left without any token
    bound: Tensor | None  # [G] whether each guarded row has bounds, if one does that has allowed tokens, too

    def apply(self, logits: Tensor, tokens: Tensor) -> None:
        """Change the logits in place. A row with no token left takes the likeliest of its allowed ones."""
        values, tokens_left = self._allow(logits)
        if self.bad_words is not None:
            self.bad_words.apply(logits, tokens)
        flat = logits.view(-1)
        flat.index_add_(0, self.shifted, self.shifts)
        left = logits[self.guarded].amax(-1)  # [G]
        revive = (left == NEVER) & (values > NEVER)
        at = self.guarded * logits.shape[1] + tokens_left
        flat[at] = torch.where(revive, 0.0, flat[at])

    def _allow(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Apply what is allowed; returns the largest logit of each guarded row, and its token, [G] each.

        Where nothing within the bounds is allowed, they are of the likeliest token within the bounds.
        """
        within = logits[self.guarded].max(-1) if self.bound is not None else None
        if self.allowed is not None:
            self.allowed.apply(logits)
        values, likeliest = logits[self.guarded].max(-1)
        if within is None or self.bound is None:
            return values, likeliest
        none = (values == NEVER) & (self.bound != 0)
        return torch.where(none, within.values, values), torch.where(none, within.indices, likeliest)


def plan_masks(packet: Packet, slots: Slots, rows: SampleRows, vocab_size: int) -> Masks | None:
    masked = np.flatnonzero(slots.masked[rows.slots])
    if not len(masked):
        return None
    params = {int(row): slots.params[rows.slots[row]] for row in masked}
    early = {row for row, each in params.items() if rows.output_index[row] < each.min_tokens}
    shifted: list[int] = []
    shifts: list[float] = []
    for row, each in params.items():
        stops = _flat(row, each.stop_token_ids, vocab_size) if row in early else []
        stops += _flat(row, each.suppressed, vocab_size)
        if not rows.output_index[row]:
            stops += _flat(row, each.suppressed_first, vocab_size)
        shifted += stops
        shifts += [NEVER] * len(stops)
        shifted += _flat(row, each.logit_bias, vocab_size)
        shifts += [bias for token, bias in each.logit_bias.items() if 0 <= token < vocab_size]
    bound = rows.bound
    narrowed = {row for row, each in params.items() if each.allowed_token_ids and row in bound}
    guarded = [
        row
        for row, each in params.items()
        if each.bad_words
        or row in early
        or row in narrowed
        or ((each.suppressed or each.suppressed_first) and (each.allowed_token_ids or row in bound))
    ]
    return Masks(
        allowed=_plan_allowed(packet, params, vocab_size),
        bad_words=_plan_bad_words(packet, params, rows, vocab_size),
        shifted=packet.ints(shifted),
        shifts=packet.floats(shifts),
        guarded=packet.ints(guarded),
        bound=packet.ints([row in bound for row in guarded]) if narrowed else None,
    )


def _plan_allowed(packet: Packet, params: dict[int, Sampling], vocab_size: int) -> Allowed | None:
    chosen = [row for row, each in params.items() if each.allowed_token_ids]
    if not chosen:
        return None
    flat = [index for row in chosen for index in _flat(row, params[row].allowed_token_ids, vocab_size)]
    return Allowed(packet.ints(chosen), packet.ints(flat))


def _plan_bad_words(
    packet: Packet, params: dict[int, Sampling], rows: SampleRows, vocab_size: int
) -> BadWords | None:
    words = [
        (row, word)
        for row, each in params.items()
        for word in each.bad_words
        if len(word) - 1 <= rows.output_index[row] and 0 <= word[-1] < vocab_size  # matches output only
    ]
    if not words:
        return None
    width = max(len(word) for _, word in words) - 1
    prefixes = [[ANY] * (width + 1 - len(word)) + list(word[:-1]) for _, word in words]
    of = [row for row, _ in words]
    return BadWords(
        prefixes=packet.ints(np.reshape(prefixes, -1)).view(len(words), width),
        slots=packet.ints(rows.slots[of]),
        lengths=packet.ints(rows.lengths[of]),
        flat=packet.ints([row * vocab_size + word[-1] for row, word in words]),
    )


def _flat(row: int, ids: Iterable[int], vocab_size: int) -> list[int]:
    """The flat indices of a row's tokens. Ids outside the vocabulary would be another row's: left out."""
    return [row * vocab_size + token for token in ids if 0 <= token < vocab_size]
