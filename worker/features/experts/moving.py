"""Moves the packed bytes of a layer's experts between ranks, into the memory of those that lay there.

Nothing is packed again, and no tensor changes its address, so what recordings and graphs know stays true.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from models.layers.experts import Experts
from models.parallel.parallel import Collectives

Pieces = Callable[[int], list[Tensor]]
"""The type of a function that returns views of the bytes of the expert at a place of this rank."""

_ADDRESSES = ("panels", "order")
"""The fields of a packed matrix's description that say where it lies."""


def choose_sources(old: Sequence[int], new: Sequence[int], held: int) -> dict[int, int]:
    """For each place whose expert changes, a place that has the new one now: on the same rank if possible.

    `old` and `new` have the expert at each place, `held` of them on each rank.
    """
    found: dict[int, list[int]] = {}
    for place, expert in enumerate(old):
        found.setdefault(expert, []).append(place)
    sources: dict[int, int] = {}
    for place, expert in enumerate(new):
        if old[place] != expert:
            near = [source for source in found[expert] if source // held == place // held]
            choices = near or found[expert]
            sources[place] = choices[place % len(choices)]
    return sources


def move(pieces: Pieces, sources: dict[int, int], held: int, rank: int, size: int, group: Collectives) -> int:
    """Fill places from their sources, on all ranks at once; returns the bytes that this one received.

    All that comes is collected first, and written then: a place may be a source too.
    """
    if not sources:
        return 0
    first = rank * held
    out: list[list[Tensor]] = [[] for _ in range(size)]
    into: list[list[int]] = [[] for _ in range(size)]
    for place, source in sorted(sources.items()):
        if source // held == rank:
            out[place // held] += pieces(source - first)
        if place // held == rank:
            into[source // held].append(place - first)
    lengths = [piece.numel() for piece in pieces(0)]
    none = pieces(0)[0][:0]
    sent = [torch.cat(parts) if parts else none for parts in out]
    received = [none.new_empty(len(places) * sum(lengths)) for places in into]
    group.exchange(sent, received).wait()
    for places, joined in zip(into, received, strict=True):
        parts = iter(joined.split(lengths * len(places))) if places else iter(())
        for place in places:
            for piece in pieces(place):
                piece.copy_(next(parts))
    return sum(joined.numel() for joined in received)


def bytes_at(experts: Experts) -> Pieces:
    """A function that finds the bytes of the expert at a place: both matrices, and its rows of biases."""
    biases = _biases(experts)

    def pieces(place: int) -> list[Tensor]:
        parts = (experts.gate_up[place], experts.down[place], *(bias[place] for bias in biases))
        return [part.detach().view(-1).view(torch.uint8) for part in parts]

    return pieces


def form_of(experts: Experts) -> int:
    """A number that ranks compare: bytes may be exchanged where it is the same, and none if it is 0."""
    biases = _biases(experts)
    if not all(part.is_contiguous() for part in (*experts.gate_up, *experts.down, *biases)):
        return 0
    (only, *others) = {
        (_form(up), _form(down)) for up, down in zip(experts.gate_up, experts.down, strict=True)
    }
    if others or "" in only:
        return 0
    rows = [(bias.dtype, bias.shape[1:]) for bias in biases]
    return 1 + zlib.crc32(repr((only, rows)).encode())


def _biases(experts: Experts) -> list[Tensor]:
    return [bias for bias in (experts.gate_up_bias, experts.down_bias) if bias is not None]


def _form(matrix: Tensor) -> str:
    """What must be equal for the bytes of one matrix to mean the same as another's; "" if no bytes would."""
    if getattr(matrix, "order", None) is not None or getattr(matrix, "apart", ()):
        return ""
    described = getattr(matrix, "described", None)
    fields = getattr(described, "_fields_", ())
    facts = [getattr(described, name) for name, _ in fields if name not in _ADDRESSES]
    form = getattr(matrix, "form", None)
    return repr((type(matrix).__name__, matrix.shape, matrix.dtype, facts, form))
