"""Layers that keep a state for each sequence, by C kernels.

Their sources are `csrc/conv.c`, `delta.c`, `scan.c`, `scan_channels.c`, `gate.c` and `group_norm.c`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.context import ForwardContext
from models.ops import recurrent_ops
from worker.kernels.cpu.library import Kernel, Library
from worker.kernels.cpu.tensors import FLOAT32, KINDS, address, check_sections, empty, refuse

_OPENINGS = {"silu": 0, "sigmoid": 1, "identity": 2, "gelu_tanh": 3}
"""The functions of gates: `opening` in `csrc/gate.c`."""


def bind(library: Library) -> dict[str, Callable[..., Any]]:
    """The operations of this module by name, for `models.ops.use`."""
    return {
        "causal_conv": partial(causal_conv, library.function("causal_conv", quick=True)),
        "keep_guesses": partial(keep_guesses, library.function("keep_guesses", quick=True)),
        "gated_delta": partial(gated_delta, library.function("gated_delta")),
        "channel_delta": partial(channel_delta, library.function("channel_delta")),
        "selective_scan": partial(selective_scan, library.function("selective_scan")),
        "channel_scan": partial(channel_scan, library.function("channel_scan")),
        **_bind_gates(library),
        **_bind_group_norms(library),
    }


def causal_conv(
    run: Kernel,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    step: ForwardContext,
    kind: str | None = None,
) -> Tensor:
    taps, channels = weight.shape
    if x.shape[1] != channels or states.shape[1:] != (taps - 1, channels):
        refuse("causal_conv", x=x, weight=weight, states=states)
    if x.dtype not in KINDS or not _are_rows(x) or kind not in (None, "silu"):
        return recurrent_ops.causal_conv(x, weight, bias, states, step, kind)
    out = empty(x.shape, x.dtype)
    run(
        *(x.data_ptr(), x.stride(0), weight.data_ptr(), address(bias)),
        *(*_sequences(states, step), out.data_ptr(), len(step.kv_lens), len(x), channels, taps),
        *(1 if kind else 0, KINDS[x.dtype]),
    )
    return out


def keep_guesses(run: Kernel, x: Tensor, kept: Tensor, step: ForwardContext) -> Tensor:
    if x.dtype != kept.dtype or x.shape[1] != kept.shape[1] or not kept.is_contiguous():
        refuse("keep_guesses", x=x, kept=kept)
    if step.states is None or not _are_rows(x):
        return recurrent_ops.keep_guesses(x, kept, step)
    table, size = step.states.table, x.dtype.itemsize
    run(
        *(x.data_ptr(), x.stride(0) * size, kept.data_ptr(), step.query_starts.data_ptr()),
        *(table.data_ptr(), table.stride(0), len(step.kv_lens), x.shape[1] * size),
    )
    return kept


def gated_delta(
    run: Kernel,
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
    _, heads, key_dim, value_dim = states.shape
    width = heads * value_dim
    if x.shape[1] != 2 * key_heads * key_dim + width or gates.shape[1] != 2 * heads or heads % key_heads:
        refuse("gated_delta", x=x, gates=gates, states=states)
    if x.dtype not in KINDS or gates.dtype != x.dtype or not (_are_rows(x) and _are_rows(gates)):
        return recurrent_ops.gated_delta(
            x, gates, speeds, shifts, states, step, key_heads, takes_turns, most_rate
        )
    out = empty((len(x), width), x.dtype)
    run(
        *(x.data_ptr(), x.stride(0), gates.data_ptr(), gates.stride(0)),
        *(speeds.data_ptr(), shifts.data_ptr(), *_sequences(states, step)),
        *(out.data_ptr(), len(step.kv_lens), key_heads, heads, key_dim, value_dim),
        *(int(takes_turns), most_rate, KINDS[x.dtype]),
    )
    return out


def channel_delta(
    run: Kernel,
    x: Tensor,
    rates: Tensor,
    decays: Tensor,
    speeds: Tensor,
    shifts: Tensor,
    states: Tensor,
    step: ForwardContext,
) -> Tensor:
    _, heads, key_dim, value_dim = states.shape
    given, width = (x, rates, decays), heads * value_dim
    if [y.shape[1] for y in given] != [2 * heads * key_dim + width, heads, heads * key_dim]:
        refuse("channel_delta", x=x, rates=rates, decays=decays, states=states)
    if x.dtype not in KINDS or not all(y.dtype == x.dtype and _are_rows(y) for y in given):
        return recurrent_ops.channel_delta(*given, speeds, shifts, states, step)
    out, made = empty((len(x), width), x.dtype), empty((len(x), heads * key_dim), torch.float32)
    run(
        *(number for y in given for number in (y.data_ptr(), y.stride(0))),
        *(speeds.data_ptr(), shifts.data_ptr(), *_sequences(states, step)),
        *(
            out.data_ptr(),
            made.data_ptr(),
            len(step.kv_lens),
            len(x),
            heads,
            key_dim,
            value_dim,
            KINDS[x.dtype],
        ),
    )
    return out


def selective_scan(
    run: Kernel,
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
    _, heads, size, width = states.shape
    if x.shape[1] != heads * width + 2 * groups * size or steps.shape[1] != heads or heads % groups:
        refuse("selective_scan", x=x, steps=steps, states=states)
    if x.dtype not in KINDS or steps.dtype != x.dtype or not (_are_rows(x) and _are_rows(steps)):
        return recurrent_ops.selective_scan(x, steps, speeds, shifts, skips, limits, states, step, groups)
    out = empty((len(x), heads * width), x.dtype)
    run(
        *(x.data_ptr(), x.stride(0), steps.data_ptr(), steps.stride(0)),
        *(speeds.data_ptr(), shifts.data_ptr(), skips.data_ptr(), *limits, *_sequences(states, step)),
        *(out.data_ptr(), len(step.kv_lens), groups, heads, size, width, KINDS[x.dtype]),
    )
    return out


def channel_scan(
    run: Kernel,
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
    _, size, channels = states.shape
    if x.shape[1] != channels or steps.shape != x.shape or speeds.shape != (size, channels):
        refuse("channel_scan", x=x, steps=steps, speeds=speeds, states=states)
    if keys.shape != (len(x), size) or queries.shape != keys.shape:
        refuse("channel_scan", x=x, keys=keys, queries=queries)
    given = (x, steps, keys, queries)
    if x.dtype not in KINDS or not all(y.dtype == x.dtype and _are_rows(y) for y in given):
        return recurrent_ops.channel_scan(*given, speeds, shifts, skips, states, step)
    out = empty((len(x), channels), x.dtype)
    run(
        *(number for y in given for number in (y.data_ptr(), y.stride(0))),
        *(speeds.data_ptr(), shifts.data_ptr(), skips.data_ptr(), *_sequences(states, step)),
        *(out.data_ptr(), len(step.kv_lens), size, channels, KINDS[x.dtype]),
    )
    return out


def _bind_group_norms(library: Library) -> dict[str, Callable[..., Tensor]]:
    run = library.function("group_norm_rows", quick=True)

    def group_squares(x: Tensor, gates: Tensor | None, groups: int, sections: int) -> Tensor:
        check_sections("group_squares", sections)
        if x.shape[1] % (groups * sections):
            refuse("group_squares", x=x)
        if not _are_gates(x, x if gates is None else gates):
            return recurrent_ops.group_squares(x, gates, groups, sections)
        squares, width = empty((len(x), groups), torch.float32), x.shape[1] // groups
        run(
            *(x.data_ptr(), x.stride(0), address(gates), 0 if gates is None else gates.stride(0)),
            *(None, squares.data_ptr(), None, len(x), groups, width, sections, 0, 0.0, KINDS[x.dtype]),
        )
        return squares

    def gated_group_norm(
        x: Tensor, gates: Tensor, weight: Tensor, squares: Tensor, count: int, eps: float
    ) -> Tensor:
        groups, features = squares.shape[1], x.shape[1]
        if weight.shape != (features,) or len(squares) != len(x) or features % groups:
            refuse("gated_group_norm", x=x, weight=weight, squares=squares)
        if not _are_gates(x, gates) or weight.dtype != torch.float32:
            return recurrent_ops.gated_group_norm(x, gates, weight, squares, count, eps)
        out = empty(x.shape, x.dtype)
        run(
            *(x.data_ptr(), x.stride(0), gates.data_ptr(), gates.stride(0), weight.data_ptr()),
            *(squares.data_ptr(), out.data_ptr(), len(x), groups, features // groups, 1, count, eps),
            KINDS[x.dtype],
        )
        return out

    return {"group_squares": group_squares, "gated_group_norm": gated_group_norm}


def _bind_gates(library: Library) -> dict[str, Callable[..., Tensor]]:
    run = library.function("gate", quick=True)

    def gate(x: Tensor, gates: Tensor, kind: str) -> Tensor:
        heads = gates.shape[1]
        if x.shape[1] % heads:
            refuse("gate", x=x, gates=gates)
        if not _are_gates(x[:, :heads], gates) or kind not in _OPENINGS:
            return recurrent_ops.gate(x, gates, kind)
        return launch(x, gates, None, 0.0, kind)

    def gated_norm(x: Tensor, gates: Tensor, weight: Tensor, eps: float, kind: str = "silu") -> Tensor:
        if x.shape[1] % len(weight):
            refuse("gated_norm", x=x, weight=weight)
        if not _are_gates(x, gates) or KINDS.get(weight.dtype) not in (KINDS[x.dtype], FLOAT32):
            return recurrent_ops.gated_norm(x, gates, weight, eps, kind)
        return launch(x, gates, weight, eps, kind)

    def launch(x: Tensor, gates: Tensor, weight: Tensor | None, eps: float, kind: str) -> Tensor:
        shared = gates.shape != x.shape
        width = x.shape[1] // (gates.shape[1] if shared else 1) if weight is None else len(weight)
        out = empty(x.shape, x.dtype)
        run(
            *(x.data_ptr(), x.stride(0), gates.data_ptr(), gates.stride(0)),
            *(address(weight), out.data_ptr()),
            *(len(x), x.shape[1] // width, width, eps, _OPENINGS[kind], KINDS[x.dtype]),
            *(KINDS[x.dtype if weight is None else weight.dtype], shared),
        )
        return out

    return {"gate": gate, "gated_norm": gated_norm}


def _sequences(states: Tensor, step: ForwardContext) -> tuple[int, ...]:
    """The states, the distance of their places, and of the step the first tokens, positions and state table.

    Places are contiguous, but may lie apart.
    """
    if step.states is None:
        raise RuntimeError("a layer with states ran in a step that does not say where they are")
    if states.dtype != torch.float32 or not states[0].is_contiguous():
        raise ValueError(f"states {list(states.shape)} of {states.dtype} do not lie as the kernels read them")
    table = step.states.table
    return (
        *(states.data_ptr(), states.stride(0), step.query_starts.data_ptr(), step.positions.data_ptr()),
        *(table.data_ptr(), table.stride(0)),
    )


def _are_rows(x: Tensor) -> bool:
    return x.dim() == 2 and x.stride(1) == 1


def _are_gates(x: Tensor, gates: Tensor) -> bool:
    if x.shape != gates.shape:
        refuse("gate", x=x, gates=gates)
    return x.dtype in KINDS and gates.dtype == x.dtype and _are_rows(x) and _are_rows(gates)
