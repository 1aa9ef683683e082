"""Norms, sums, means and activations by C kernels: `csrc/norm.c`, `sum.c`, `pooling.c` and `activation.c`.

The reference computes what the kernels cannot (float16, weights in another type than they expect).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from models.ops import latent_ops, reference
from worker.kernels.cpu import portable
from worker.kernels.cpu.library import FLOAT, INT, LONG, POINTER, Library
from worker.kernels.cpu.packing import FLOAT32, KINDS
from worker.kernels.cpu.recording.outputs import empty
from worker.kernels.cpu.shapes import refuse

FUNCTIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
"""The activations that kernels compute: `function` in `csrc/functions.h`."""
GATES = FUNCTIONS | {"clamped": 5}
"""The activations of gates."""


def bind(library: Library) -> dict[str, Callable[..., Any]]:
    """The operations of this module by name, for `models.ops.use`."""
    return (
        _rms_norms(library)
        | _spread_norms(library)
        | _front_norms(library)
        | _layer_norms(library)
        | _sums(library)
        | _means(library)
        | activations(library)
    )


def _rms_norms(library: Library) -> dict[str, Callable[..., Any]]:
    run = library.function(
        "rms_norm",
        *(POINTER, LONG, POINTER, LONG, POINTER),  # x, residual, weight
        *(POINTER, POINTER, LONG, LONG, FLOAT, INT, INT),  # out, sum, sizes, eps, kinds
        quick=True,
    )

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        kinds = _kinds("rms_norm", x, weight)
        if kinds is None:
            return reference.rms_norm(x, weight, eps)
        x, stride, rows, width = _rows(x)
        out = empty(x.shape, x.dtype)
        run(
            *(x.data_ptr(), stride, None, 0, weight.data_ptr()),
            *(out.data_ptr(), None, rows, width, eps, *kinds),
        )
        return out

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        kinds = _kinds("add_rms_norm", x, weight)
        if kinds is None or not _alike(x, residual):
            return reference.add_rms_norm(x, residual, weight, eps)
        x, stride, rows, width = _rows(x)
        residual, residual_stride, _, _ = _rows(residual)
        out, total = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
        run(
            *(x.data_ptr(), stride, residual.data_ptr(), residual_stride, weight.data_ptr()),
            *(out.data_ptr(), total.data_ptr(), rows, width, eps, *kinds),
        )
        return out, total

    return {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm}


def _spread_norms(library: Library) -> dict[str, Callable[..., Any]]:
    add_up = library.function("sum_squares", POINTER, LONG, POINTER, LONG, LONG, INT, INT, quick=True)
    run = library.function(
        "spread_rms_norm",
        *(POINTER, LONG, POINTER, POINTER, LONG),  # x, weight, squares
        *(POINTER, LONG, LONG, FLOAT, INT, INT),  # out, sizes, eps, kinds
        quick=True,
    )

    def sum_squares(x: Tensor, sections: int) -> Tensor:
        if x.dtype not in KINDS:
            return reference.sum_squares(x, sections)
        if x.shape[-1] % sections:
            refuse("sum_squares", x=x)
        x, stride, rows, width = _rows(x)
        out = empty((rows, 1), torch.float32)
        add_up(x.data_ptr(), stride, out.data_ptr(), rows, width, sections, KINDS[x.dtype])
        return out

    def spread_rms_norm(x: Tensor, weight: Tensor, squares: Tensor, count: int, eps: float) -> Tensor:
        kinds = _kinds("spread_rms_norm", x, weight)
        if squares.shape != (len(x), 1) or squares.dtype != torch.float32:
            refuse("spread_rms_norm", x=x, squares=squares)
        if kinds is None:
            return reference.spread_rms_norm(x, weight, squares, count, eps)
        x, stride, rows, width = _rows(x)
        squares, out = squares.contiguous(), empty(x.shape, x.dtype)
        run(
            *(x.data_ptr(), stride, weight.data_ptr(), squares.data_ptr(), count),
            *(out.data_ptr(), rows, width, eps, *kinds),
        )
        return out

    return {"sum_squares": sum_squares, "spread_rms_norm": spread_rms_norm}


def _front_norms(library: Library) -> dict[str, Callable[..., Any]]:
    run = library.function(
        "front_rms_norm",
        *(POINTER, LONG, POINTER, POINTER, LONG, LONG, LONG),  # x, weight, out, sizes
        *(FLOAT, INT, INT),  # eps, kinds
        quick=True,
    )

    def front_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        front = len(weight)
        if x.dim() != 2 or front > x.shape[1]:
            refuse("front_rms_norm", x=x, weight=weight)
        kinds = _kinds("front_rms_norm", x[:, :front], weight)
        if kinds is None:
            return latent_ops.front_rms_norm(x, weight, eps)
        x, stride, rows, width = _rows(x)
        out = empty(x.shape, x.dtype)
        run(
            *(x.data_ptr(), stride, weight.data_ptr(), out.data_ptr(), rows, front, width - front),
            *(eps, *kinds),
        )
        return out

    return {"front_rms_norm": front_rms_norm}


def _layer_norms(library: Library) -> dict[str, Callable[..., Any]]:
    run = library.function(
        "layer_norm",
        *(POINTER, LONG, POINTER, LONG, POINTER, POINTER),  # x, residual, weight, bias
        *(POINTER, POINTER, LONG, LONG, FLOAT, INT, INT),  # out, sum, sizes, eps, kinds
        quick=True,
    )

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        kinds = _kinds("layer_norm", x, weight, bias)
        if kinds is None:
            return reference.layer_norm(x, weight, bias, eps)
        x, stride, rows, width = _rows(x)
        out = empty(x.shape, x.dtype)
        run(
            *(x.data_ptr(), stride, None, 0, weight.data_ptr(), None if bias is None else bias.data_ptr()),
            *(out.data_ptr(), None, rows, width, eps, *kinds),
        )
        return out

    def add_layer_norm(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        kinds = _kinds("add_layer_norm", x, weight, bias)
        if kinds is None or not _alike(x, residual):
            return reference.add_layer_norm(x, residual, weight, bias, eps)
        x, stride, rows, width = _rows(x)
        residual, residual_stride, _, _ = _rows(residual)
        out, total = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
        run(
            *(x.data_ptr(), stride, residual.data_ptr(), residual_stride, weight.data_ptr()),
            *(None if bias is None else bias.data_ptr(), out.data_ptr(), total.data_ptr()),
            *(rows, width, eps, *kinds),
        )
        return out, total

    return {"layer_norm": layer_norm, "add_layer_norm": add_layer_norm}


def _sums(library: Library) -> dict[str, Callable[..., Any]]:
    run = library.function("add", POINTER, LONG, POINTER, LONG, POINTER, LONG, LONG, INT, quick=True)
    multiply = library.function("scale", POINTER, LONG, POINTER, LONG, LONG, FLOAT, INT, quick=True)
    grow = library.function(
        "scale_by_position", POINTER, LONG, POINTER, POINTER, LONG, LONG, FLOAT, FLOAT, INT, quick=True
    )

    def add(x: Tensor, y: Tensor) -> Tensor:
        if x.dtype not in KINDS or x.dtype != y.dtype or y.shape not in (x.shape, x.shape[-1:]):
            return reference.add(x, y)
        x, stride, rows, width = _rows(x)
        y, y_stride, _, _ = _rows(y)
        out = empty(x.shape, x.dtype)
        repeated = 0 if y.dim() == 1 else y_stride
        run(x.data_ptr(), stride, y.data_ptr(), repeated, out.data_ptr(), rows, width, KINDS[x.dtype])
        return out

    def scale(x: Tensor, factor: float) -> Tensor:
        if x.dtype not in KINDS:
            return reference.scale(x, factor)
        x, stride, rows, width = _rows(x)
        out = empty(x.shape, x.dtype)
        multiply(x.data_ptr(), stride, out.data_ptr(), rows, width, factor, KINDS[x.dtype])
        return out

    def scale_by_position(x: Tensor, positions: Tensor, rate: float, length: int) -> Tensor:
        known = positions.dtype == torch.int64 and positions.shape == x.shape[:1]
        if x.dtype not in KINDS or not (known and positions.is_contiguous()):
            return reference.scale_by_position(x, positions, rate, length)
        x, stride, rows, width = _rows(x)
        out = empty(x.shape, x.dtype)
        grow(
            *(x.data_ptr(), stride, positions.data_ptr(), out.data_ptr(), rows, width),
            *(rate, float(length), KINDS[x.dtype]),
        )
        return out

    return {"add": add, "scale": scale, "scale_by_position": scale_by_position}


def _means(library: Library) -> dict[str, Callable[..., Any]]:
    add_up = library.function("mean", POINTER, LONG, LONG, LONG, POINTER, INT)
    scale = library.function("normalize", POINTER, LONG, LONG, LONG, POINTER, quick=True)

    def mean(rows: Tensor) -> Tensor:
        kind, (count, width) = KINDS.get(rows.dtype), rows.shape
        if kind is None or rows.stride(1) != 1:
            return reference.mean(rows)
        out = empty((1, width), torch.float32)
        add_up(rows.data_ptr(), rows.stride(0), count, width, out.data_ptr(), kind)
        return out

    def normalize(rows: Tensor) -> Tensor:
        if rows.dtype != torch.float32 or rows.stride(1) != 1:
            return reference.normalize(rows)
        out = empty(rows.shape, torch.float32)
        scale(rows.data_ptr(), rows.stride(0), *rows.shape, out.data_ptr())
        return out

    return {"mean": mean, "normalize": normalize}


def activations(library: Library) -> dict[str, Callable[..., Any]]:
    run = library.function("activation", POINTER, LONG, POINTER, LONG, LONG, INT, INT, INT, quick=True)

    def activation(x: Tensor, kind: str) -> Tensor:
        if x.dtype not in KINDS or kind not in FUNCTIONS:
            return portable.activation(x, kind)
        x, stride, rows, width = _rows(x)
        out = empty(x.shape, x.dtype)
        run(x.data_ptr(), stride, out.data_ptr(), rows, width, 0, FUNCTIONS[kind], KINDS[x.dtype])
        return out

    def gated(gate_up: Tensor, kind: str) -> Tensor:
        if gate_up.dtype not in KINDS or kind not in GATES:
            return portable.gated(gate_up, kind)
        if gate_up.shape[-1] % 2:
            refuse("gated", gate_up=gate_up)
        x, stride, rows, width = _rows(gate_up)
        out = empty((*x.shape[:-1], width // 2), x.dtype)
        run(x.data_ptr(), stride, out.data_ptr(), rows, width // 2, 1, GATES[kind], KINDS[x.dtype])
        return out

    return {"activation": activation, "gated": gated}


def _kinds(operation: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[int, int] | None:
    """The kinds of x and of its weights; None if the kernels do not know them.

    Weights are of the type of x or float32. Raises ValueError if there is not a weight for each column.
    """
    if weight.shape != (x.shape[-1],) or (bias is not None and bias.shape != weight.shape):
        refuse(operation, x=x, weight=weight, bias=bias)
    kind, weight_kind = KINDS.get(x.dtype), KINDS.get(weight.dtype)
    if kind is None or weight_kind is None or weight_kind not in (kind, FLOAT32):
        return None
    if not weight.is_contiguous():
        return None
    if bias is not None and (bias.dtype != weight.dtype or not bias.is_contiguous()):
        return None
    return kind, weight_kind


def _alike(x: Tensor, residual: Tensor) -> bool:
    return x.dtype == residual.dtype and x.shape == residual.shape


def _rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """-> (x, or a copy of it with contiguous rows; the stride of rows; their number; their width)."""
    width = x.shape[-1]
    if x.is_contiguous():
        return x, width, x.numel() // max(width, 1), width
    if x.dim() == 2 and x.stride(1) == 1:
        return x, x.stride(0), x.shape[0], width
    return _rows(x.contiguous())
