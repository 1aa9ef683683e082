"""Operations of layers that keep a state for each sequence, in place of keys and values: in plain torch.

A state lies in a place, a row of the tensor that the worker has bound to the layer. The context tells from
which place the state of each sequence of a step is read, and to which its new one is written; states after
some of the tokens may be kept in other places. A sequence whose first token is in the step begins with zeros,
whatever its place holds. Guesses of its next tokens follow it in rows of their own, which it computes too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.context import ForwardContext
from models.ops.reference import activation
from models.ops.tree_sum import add_in_pairs
from models.state_rows import NOWHERE, StateRow


class _Sequence(NamedTuple):
    """A sequence of a step, whose tokens are `first` to `last`."""

    first: int
    last: int
    before: Tensor
    """Its state before them."""
    row: StateRow

    def ends(self) -> Iterator[tuple[int, int]]:
        """Where its state is wanted, as (number of tokens, place)."""
        yield from self.row.kept
        if self.row.target != NOWHERE:
            yield self.last - self.first, self.row.target

    def keep(self, token: int, state: Tensor, states: Tensor) -> None:
        """Write the state behind a token of the step to the places where it is wanted."""
        for count, place in self.ends():
            if count == token + 1 - self.first:
                states[place] = state


def _sequences(step: ForwardContext, states: Tensor) -> list[_Sequence]:
    """The sequences of a step, with their guesses. All their states are read before any is written."""
    if step.states is None:
        raise RuntimeError("a layer with states ran in a step that does not say where they are")
    found: list[_Sequence] = []
    first = 0
    for row, count, total in zip(step.states.host, step.query_lens_host, step.kv_lens_host, strict=True):
        if row.source != NOWHERE:
            before = torch.zeros_like(states[0]) if count == total else states[row.source].clone()
            found.append(_Sequence(first, first + count + row.more, before, row))
        first += count
    return found


def keep_guesses(x: Tensor, kept: Tensor, step: ForwardContext) -> Tensor:
    """Write the rows of x [T, F] that belong to guesses to kept [guesses, F], one after the other -> kept."""
    if step.states is None:
        raise RuntimeError("a layer with states ran in a step that does not say where they are")
    first = place = 0
    for row, count in zip(step.states.host, step.query_lens_host, strict=True):
        first += count
        if row.more > 0:
            kept[place : place + row.more] = x[first : first + row.more]
            place += row.more
    return kept


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    step: ForwardContext,
    kind: str | None = None,
) -> Tensor:
    """Convolve each channel of x [T, C] with the inputs before it in its sequence -> [T, C].

    weight [taps, C] and bias [C] are float32; the last tap belongs to the token itself. states [places,
    taps - 1, C] float32 hold the inputs before a step. `kind` names an activation that follows.
    """
    out = torch.empty_like(x)
    for sequence in _sequences(step, states):
        tokens = slice(sequence.first, sequence.last)
        inputs = torch.cat([sequence.before, x[tokens].to(states.dtype)])  # [taps - 1 + count, C]
        windows = inputs.unfold(0, len(weight), 1)  # [count, C, taps]
        result = (windows * weight.t()).sum(-1)
        result = result if bias is None else result + bias
        out[tokens] = activation(result, kind).to(x.dtype) if kind else result.to(x.dtype)
        for count, place in sequence.ends():
            states[place] = inputs[count : count + len(weight) - 1]
    return out


def gated_delta(
    x: Tensor,
    gates: Tensor,
    speeds: Tensor,
    shifts: Tensor,
    states: Tensor,
    step: ForwardContext,
    key_heads: int,
    takes_turns: bool = False,
    most_rate: float = 1.0,
) -> Tensor:
    """The gated delta rule: read what a state knows, after it has learnt each token -> [T, V * dv].

    x [T, 2 * key_heads * dk + V * dv]: queries and keys of the key heads, then the values of V heads, of
    which neighbours share a key head, or, if heads take turns, those of the same remainder. gates [T, 2 * V]:
    from them come the rates at which heads learn, up to `most_rate`, and how they forget; speeds and shifts
    [V] are float32.
    states [places, V, dk, dv] float32.
    """
    _, heads, key_dim, value_dim = states.shape
    q, k, v = x.to(states.dtype).split([key_heads * key_dim, key_heads * key_dim, heads * value_dim], dim=-1)
    shared = heads // key_heads
    q, k = (_of_length_1(y.unflatten(-1, (key_heads, key_dim))) for y in (q, k))
    q, k = (y.repeat(1, shared, 1) if takes_turns else y.repeat_interleave(shared, 1) for y in (q, k))
    q, v = q * key_dim**-0.5, v.unflatten(-1, (heads, value_dim))
    rates, decays = gates.to(states.dtype).chunk(2, dim=-1)
    rates, decays = most_rate * rates.sigmoid(), (speeds * F.softplus(decays + shifts)).exp()
    return _learn(q, k, v, rates, decays.unsqueeze(-1), states, step).to(x.dtype)


def channel_delta(
    x: Tensor,
    rates: Tensor,
    decays: Tensor,
    speeds: Tensor,
    shifts: Tensor,
    states: Tensor,
    step: ForwardContext,
) -> Tensor:
    """The delta rule of Kimi Linear, in which each number of a key forgets by itself -> [T, H * dv].

    x [T, H * (2 * dk + dv)]: the queries, keys and values of H heads. From gates come the rates [T, H] at
    which heads learn, and decays [T, H * dk], how they forget; speeds [H] and shifts [H * dk] are float32.
    states [places, H, dk, dv] float32.
    """
    _, heads, key_dim, value_dim = states.shape
    parts = x.to(states.dtype).split([heads * key_dim, heads * key_dim, heads * value_dim], dim=-1)
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in parts)
    q, k = _of_length_1(q) * key_dim**-0.5, _of_length_1(k)
    forgotten = F.softplus(decays.to(states.dtype) + shifts).unflatten(-1, (heads, key_dim))
    decays, rates = (speeds.unsqueeze(-1) * forgotten).exp(), rates.to(states.dtype).sigmoid()
    return _learn(q, k, v, rates, decays, states, step).to(x.dtype)


def _learn(
    q: Tensor, k: Tensor, v: Tensor, rates: Tensor, decays: Tensor, states: Tensor, step: ForwardContext
) -> Tensor:
    """Let heads learn values v [T, V, dv] under keys [T, V, dk] at rates [T, V], and ask them -> [T, V * dv].

    decays [T, V, dk], or [T, V, 1] for all numbers of a key.
    """
    out = torch.empty_like(v)
    for sequence in _sequences(step, states):
        state = sequence.before
        for t in range(sequence.first, sequence.last):
            state *= decays[t].unsqueeze(-1)
            known = (state * k[t].unsqueeze(-1)).sum(1)  # [V, dv]
            learnt = (v[t] - known) * rates[t, :, None]
            state += k[t].unsqueeze(-1) * learnt.unsqueeze(1)
            out[t] = (state * q[t].unsqueeze(-1)).sum(1)
            sequence.keep(t, state, states)
    return out.flatten(1)


def selective_scan(
    x: Tensor,
    steps: Tensor,
    speeds: Tensor,
    shifts: Tensor,
    skips: Tensor,
    limits: tuple[float, float],
    states: Tensor,
    step: ForwardContext,
    groups: int,
) -> Tensor:
    """The scan of Mamba-2: read what a state knows, after it has added each token -> [T, H * P].

    x [T, H * P + 2 * groups * N]: the values of H heads, then the keys and the queries of groups, each of
    which belong to neighbouring heads. steps [T, H]: from them come the times that pass, within `limits`;
    speeds, shifts and skips [H] are float32. states [places, H, N, P] float32.
    """
    _, heads, size, width = states.shape
    shared = groups * size
    values, keys, queries = x.to(states.dtype).split([heads * width, shared, shared], dim=-1)
    values = values.unflatten(-1, (heads, width))
    keys, queries = (
        y.unflatten(-1, (groups, size)).repeat_interleave(heads // groups, 1) for y in (keys, queries)
    )
    times = F.softplus(steps.to(states.dtype) + shifts).clamp(*limits)
    decays, out = (speeds * times).exp(), values * skips.unsqueeze(-1)
    for sequence in _sequences(step, states):
        state = sequence.before
        for t in range(sequence.first, sequence.last):
            added = values[t] * times[t, :, None]
            state = state * decays[t, :, None, None] + keys[t].unsqueeze(-1) * added.unsqueeze(1)
            out[t] += (state * queries[t].unsqueeze(-1)).sum(1)
            sequence.keep(t, state, states)
    return out.flatten(1).to(x.dtype)


def channel_scan(
    x: Tensor,
    steps: Tensor,
    keys: Tensor,
    queries: Tensor,
    speeds: Tensor,
    shifts: Tensor,
    skips: Tensor,
    states: Tensor,
    step: ForwardContext,
) -> Tensor:
    """The scan of the first Mamba: read what a state knows, after it has added each token -> [T, C].

    x [T, C]: the values of channels, whose keys and queries [T, N] are the same. steps [T, C]: from them come
    the times that pass. speeds [N, C], shifts and skips [C] are float32. states [places, N, C] float32.
    """
    values, keys, queries = (y.to(states.dtype) for y in (x, keys, queries))
    times, out = F.softplus(steps.to(states.dtype) + shifts), values * skips
    for sequence in _sequences(step, states):
        state = sequence.before
        for t in range(sequence.first, sequence.last):
            added = keys[t].unsqueeze(-1) * (values[t] * times[t])
            state = state * (speeds * times[t]).exp() + added
            out[t] += (state * queries[t].unsqueeze(-1)).sum(0)
            sequence.keep(t, state, states)
    return out.to(x.dtype)


def _of_length_1(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gate(x: Tensor, gates: Tensor, kind: str) -> Tensor:
    """x [T, F] times a function of gates [T, F]: "sigmoid", "identity", or one that `activation` has.

    Of fewer gates [T, H] each is one for F / H features side by side.
    """
    opened = _opened(gates, kind)
    if x.shape != gates.shape:
        opened = opened.repeat_interleave(x.shape[1] // gates.shape[1], dim=1)
    return (_wide(x) * opened).to(x.dtype)


def gated_norm(x: Tensor, gates: Tensor, weight: Tensor, eps: float, kind: str = "silu") -> Tensor:
    """RMS norm of each head of x [T, H * D] by weight [D], times a function of gates [T, H * D]."""
    heads = _wide(x).unflatten(-1, (-1, len(weight)))
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight
    return (normed.flatten(1) * _opened(gates, kind)).to(x.dtype)


def group_squares(x: Tensor, gates: Tensor | None, groups: int, sections: int) -> Tensor:
    """Add up the squares of each group of x [T, F] times silu of gates [T, F], if there are -> [T, groups].

    The result is float32: each group's sum is made in so many sections, and these are added in pairs.
    """
    wide = _wide(x) if gates is None else _wide(x) * _opened(gates, "silu")
    squares = wide.square().unflatten(-1, (groups, sections, -1)).sum(-1)
    return add_in_pairs(squares.unbind(-1))


def gated_group_norm(
    x: Tensor, gates: Tensor, weight: Tensor, squares: Tensor, count: int, eps: float
) -> Tensor:
    """RMS norm by weight [F] float32 of each group of x [T, F], times silu of gates [T, F].

    squares [T, groups] sum those of `count` numbers, of which other ranks may hold some.
    """
    groups = squares.shape[-1]
    wide = (_wide(x) * _opened(gates, "silu")).unflatten(-1, (groups, -1))
    normed = wide * (1 / torch.sqrt(squares / count + eps)).unsqueeze(-1)
    return (normed.flatten(1) * weight).to(x.dtype)


def _opened(gates: Tensor, kind: str) -> Tensor:
    wide = _wide(gates)
    if kind == "identity":
        return wide
    return wide.sigmoid() if kind == "sigmoid" else activation(wide, kind)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
