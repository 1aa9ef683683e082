"""Sends tokens to experts that lie on other ranks, and brings the results back.

Replicas that share experts compute different tokens, in steps that they take together. The ranks of one
replica all have its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.context import context
from models.ops.tree_sum import add_in_pairs
from models.parallel.experts import ExpertPlace
from models.parallel.parallel import Parallel, Replicas

AddUp = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The type of a function that sends rows [T, H] through those of their chosen experts, given by numbers and
weights [T, k], that this rank holds -> the sums [T, H]."""


def sum_over_replicas(replicas: Replicas, x: Tensor, ids: Tensor, shares: Tensor, add_up: AddUp) -> Tensor:
    """Send all rows to all replicas; each rank adds up what its experts make of them, and returns the sums.

    x [T, H] and the choices of this replica -> the sums of all replicas [T, H], in the type of `add_up`.
    """
    counts = context().replica_tokens
    rows = _Rows((x, ids, shares))
    everyone = rows.empty(sum(counts))
    replicas.group.exchange([rows.join()] * replicas.size, everyone.split(counts)).wait()
    totals = add_up(*rows.split(everyone))
    own = totals.new_empty(replicas.size, len(x), totals.shape[1])
    replicas.group.exchange(totals.split(counts), list(own)).wait()
    return add_in_pairs([each.float() for each in own]).to(totals.dtype)


class ApartTransport:
    """Sends a row to the ranks that hold its experts, each of which returns every expert's result by itself.

    They are added up where the row came from, in the order of experts: so it changes no bit where those lie.
    """

    def __init__(self, place: ExpertPlace, parallel: Parallel, count: int, device: torch.device) -> None:
        """`count`: the number of experts of the layer."""
        layout = place.layout(count)
        self._parallel = parallel
        self._held = len(layout) // place.size
        self._first = place.rank * self._held
        places = torch.empty(count, dtype=torch.int32)
        places[torch.tensor(layout)] = torch.arange(count, dtype=torch.int32)
        self._places = places.to(device)
        """The place of each expert [E] among those of all ranks."""

    def __call__(self, x: Tensor, ids: Tensor, shares: Tensor, add_up: AddUp) -> Tensor:
        """x [T, H] and what was chosen for it [T, k] -> the sums [T, H] float32.

        `add_up` is called with numbers of this rank's matrices in place of those of experts.
        """
        parallel, places = self._parallel, self._places[ids.long()]
        results = torch.zeros(places.numel(), x.shape[1], dtype=torch.float32, device=x.device)
        if parallel.replicas is None:
            self._compute_here(x, places, results, add_up)
        else:
            self._compute_anywhere(parallel.replicas, x, places, results, add_up)
        results = parallel.all_reduce(results).view(*places.shape, x.shape[1])  # all but one rank's are 0
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for choice in range(places.shape[1]):  # no fused products: they would round by the shape of the rest
            total += results[:, choice] * shares[:, choice, None]
        return total

    def _compute_here(self, x: Tensor, places: Tensor, results: Tensor, add_up: AddUp) -> None:
        """Fill in the results [T k, H] of this rank's experts."""
        local = places - self._first
        flat = ((local >= 0) & (local < self._held)).view(-1).nonzero().view(-1)
        results[flat] = _each(x, local, flat, add_up)

    def _compute_anywhere(
        self, replicas: Replicas, x: Tensor, places: Tensor, results: Tensor, add_up: AddUp
    ) -> None:
        """Fill in the results [T k, H] of experts on this rank and on those of its number elsewhere."""
        owners = places // self._held  # expert ranks: replica by replica, tensor ranks within
        mine = owners % self._parallel.size == self._parallel.rank
        wanted = [(owners // self._parallel.size == replica) & mine for replica in range(replicas.size)]
        sent = [chosen.any(-1).nonzero().view(-1) for chosen in wanted]
        counts = _exchange_counts(replicas, [len(index) for index in sent], x.device)
        rows = _Rows((x, places))
        everyone = rows.empty(sum(counts))
        out = [
            _Rows((x[index], torch.where(chosen, places, -1)[index])).join()
            for index, chosen in zip(sent, wanted, strict=True)
        ]
        replicas.group.exchange(out, everyone.split(counts)).wait()

        given, there = rows.split(everyone)
        flat = (there >= 0).view(-1).nonzero().view(-1)
        made = _each(given, there - self._first, flat, add_up)
        made_for = [int((piece >= 0).sum()) for piece in there.split(counts)]
        back = [chosen.view(-1).nonzero().view(-1) for chosen in wanted]
        came = [made.new_empty(len(index), made.shape[1]) for index in back]
        replicas.group.exchange(made.split(made_for), came).wait()
        for index, values in zip(back, came, strict=True):
            results[index] = values


def _each(x: Tensor, local: Tensor, flat: Tensor, add_up: AddUp) -> Tensor:
    """The results [P, H] float32 of P choices, which `flat` numbers in `local` [T, k], each by itself."""
    if not len(flat):
        return torch.empty(0, x.shape[1], dtype=torch.float32, device=x.device)
    ids = local.reshape(-1)[flat].view(-1, 1)
    return add_up(x[flat // local.shape[1]], ids.int(), torch.ones_like(ids, dtype=torch.float32)).float()


def _exchange_counts(replicas: Replicas, counts: list[int], device: torch.device) -> list[int]:
    """Tell each replica a number; returns theirs."""
    out = torch.tensor(counts, device=device).view(-1, 1)
    into = torch.empty_like(out)
    replicas.group.exchange(list(out), list(into)).wait()
    return into.view(-1).tolist()


@dataclass(frozen=True, slots=True)
class _Rows:
    """Tensors [T, ...] of different types, whose rows are sent as bytes [T, n] at once."""

    parts: tuple[Tensor, ...]

    def join(self) -> Tensor:
        return torch.cat([part.contiguous().view(torch.uint8) for part in self.parts], dim=1)

    def empty(self, count: int) -> Tensor:
        return torch.empty(count, sum(self._sizes()), dtype=torch.uint8, device=self.parts[0].device)

    def split(self, joined: Tensor) -> tuple[Tensor, ...]:
        """Rows that were joined, as tensors of the types of these."""
        pieces = joined.split(self._sizes(), dim=1)
        return tuple(
            piece.contiguous().view(part.dtype) for piece, part in zip(pieces, self.parts, strict=True)
        )

    def _sizes(self) -> list[int]:
        return [part.shape[1] * part.dtype.itemsize for part in self.parts]
