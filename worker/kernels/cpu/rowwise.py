"""Operations on rows by C kernels: embeddings, angles, patches, norms, sums, activations, and rows merged.

Their sources are `csrc/embedding.c`, `embed_packed.c`, `norm.c`, `sum.c`, `pooling.c` and `activation.c`. The
reference computes what the kernels cannot (float16, weights in another type than they expect).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from models.ops import encoder_ops, latent_ops, pooling_ops, reference
from models.ops.pooling_ops import Merge, Segments
from models.weight_coding import LEVELS
from worker.kernels.cpu import torch_operations
from worker.kernels.cpu.library import Library
from worker.kernels.cpu.packing import CODES, Packed
from worker.kernels.cpu.quantization import Quantized
from worker.kernels.cpu.tensors import FLOAT32, KINDS, address, check_sections, empty, refuse

FUNCTIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "relu_squared": 6, "quick_gelu": 7}
"""The activations that kernels compute: `function` in `csrc/functions.h`."""
GATES = FUNCTIONS | {"clamped": 5}
"""The activations of gates."""

_MODES = {"CLS": 0, "LAST": 1, "MEAN": 2}
"""The ways of merging rows that the kernel has, as `csrc/pooling.c` numbers them."""

Operations = dict[str, Callable[..., Any]]


def bind(library: Library) -> Operations:
    """The operations of this module by name, for `models.ops.use`."""
    run_norm = library.function("norm", quick=True)
    return (
        _embeddings(library)
        | _patches(library)
        | _norms(run_norm)
        | _norms_of_parts(run_norm)
        | _sums(library)
        | _sums_over_rows(library)
        | activations(library)
    )


def _embeddings(library: Library) -> Operations:
    look_up = library.function("embed", quick=True)
    widen = library.function("embed_packed", quick=True)
    levels = {
        (kind, numbers): torch.tensor(LEVELS[kind], dtype=numbers).float()
        for kind in LEVELS
        for numbers in KINDS
    }
    turn = library.function("angles", quick=True)

    def embed(ids: Tensor, weight: Tensor) -> Tensor:
        if type(weight) is Packed:
            table = levels.get((CODES[weight.described.codes], weight.numbers))
            out, ids = empty((len(ids), weight.inputs), weight.numbers), ids.contiguous()
            widen(ids.data_ptr(), weight.address, address(table), out.data_ptr(), len(ids))
            return out
        if type(weight) is Quantized or not (_are_numbers(ids) and weight.is_contiguous()):
            return torch_operations.embed(ids, weight)
        known, width = weight.shape
        out = empty((len(ids), width), weight.dtype)
        look_up(ids.data_ptr(), weight.data_ptr(), out.data_ptr(), len(ids), known, width * weight.itemsize)
        return out

    def angles(positions: Tensor, frequencies: Tensor, scale: float, axes: Tensor | None = None) -> Tensor:
        known = frequencies.dtype == torch.float32 and frequencies.dim() == 1 and frequencies.is_contiguous()
        place = positions if axes is None else positions[0]
        if not (known and _are_numbers(place) and positions.is_contiguous()):
            return reference.angles(positions, frequencies, scale, axes)
        tokens, pairs = len(place), len(frequencies)
        out = empty((tokens, 2 * pairs), torch.float32)
        given = positions.data_ptr(), frequencies.data_ptr(), address(axes)
        turn(*given, out.data_ptr(), tokens, pairs, scale)
        return out

    return {"embed": embed, "angles": angles}


def _patches(library: Library) -> Operations:
    cut = library.unrecorded("patches")

    def patches(pixels: Tensor, levels: Tensor, side: int, *, depth: int = 1, merge: int = 1) -> Tensor:
        known = pixels.dtype == torch.uint8 and pixels.is_contiguous() and levels.is_contiguous()
        if not known or levels.dtype not in KINDS:
            return encoder_ops.patches(pixels, levels, side, depth=depth, merge=merge)
        if pixels.dim() != 4 or pixels.shape[3] != 3 or levels.shape != (3, 256):
            refuse("patches", pixels=pixels, levels=levels)
        frames, height, width, _ = pixels.shape
        square = side * merge
        count = -(-frames // depth) * (height // square) * (width // square) * merge**2
        out = empty((count, 3 * depth * side * side), levels.dtype)
        given = pixels.data_ptr(), levels.data_ptr(), out.data_ptr(), frames, height, width
        cut(*given, side, depth, merge, levels.itemsize)
        return out

    return {"patches": patches}


def _norms(run: Callable[..., None]) -> Operations:
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        kinds = _kinds("rms_norm", x, weight)
        if kinds is None:
            return reference.rms_norm(x, weight, eps)
        return _norm(run, x, weight, eps, kinds)

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        kinds = _kinds("add_rms_norm", x, weight)
        if kinds is None or not _alike(x, residual):
            return reference.add_rms_norm(x, residual, weight, eps)
        total = empty(x.shape, x.dtype)
        return _norm(run, x, weight, eps, kinds, residual=residual, total=total), total

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        kinds = _kinds("layer_norm", x, weight, bias)
        if kinds is None:
            return reference.layer_norm(x, weight, bias, eps)
        return _norm(run, x, weight, eps, kinds, bias=bias, centred=True)

    def add_layer_norm(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        kinds = _kinds("add_layer_norm", x, weight, bias)
        if kinds is None or not _alike(x, residual):
            return reference.add_layer_norm(x, residual, weight, bias, eps)
        total = empty(x.shape, x.dtype)
        out = _norm(run, x, weight, eps, kinds, bias=bias, residual=residual, total=total, centred=True)
        return out, total

    return {
        "rms_norm": rms_norm,
        "add_rms_norm": add_rms_norm,
        "layer_norm": layer_norm,
        "add_layer_norm": add_layer_norm,
    }


def _norms_of_parts(run: Callable[..., None]) -> Operations:
    """Norms of rows of which other ranks hold a part, and of the front of rows."""

    def spread_rms_norm(x: Tensor, weight: Tensor, squares: Tensor, count: int, eps: float) -> Tensor:
        kinds = _kinds("spread_rms_norm", x, weight)
        if squares.shape != (len(x), 1) or squares.dtype != torch.float32:
            refuse("spread_rms_norm", x=x, squares=squares)
        if kinds is None:
            return reference.spread_rms_norm(x, weight, squares, count, eps)
        return _norm(run, x, weight, eps, kinds, squares=squares.contiguous(), count=count)

    def front_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        front = len(weight)
        if x.dim() != 2 or front > x.shape[1]:
            refuse("front_rms_norm", x=x, weight=weight)
        kinds = _kinds("front_rms_norm", x[:, :front], weight)
        if kinds is None:
            return latent_ops.front_rms_norm(x, weight, eps)
        return _norm(run, x, weight, eps, kinds)

    return {"spread_rms_norm": spread_rms_norm, "front_rms_norm": front_rms_norm}


def _norm(
    run: Callable[..., None],
    x: Tensor,
    weight: Tensor,
    eps: float,
    kinds: tuple[int, int],
    *,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    bias: Tensor | None = None,
    squares: Tensor | None = None,
    count: int = 0,
    centred: bool = False,
) -> Tensor:
    """Call the kernel `norm`, which copies what is in rows behind as many numbers as weights."""
    x, stride, rows, width = _rows(x)
    residual_stride = 0
    if residual is not None:
        residual, residual_stride, _, _ = _rows(residual)
    front, out = len(weight), empty(x.shape, x.dtype)
    run(
        *(x.data_ptr(), stride, address(residual), residual_stride, address(total)),
        *(weight.data_ptr(), address(bias), out.data_ptr(), rows, front, eps, *kinds),
        *(centred, address(squares), count, width - front),
    )
    return out


def _sums(library: Library) -> Operations:
    run = library.function("add", quick=True)
    multiply = library.function("scale", quick=True)
    grow = library.function("scale_by_position", quick=True)

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
        known = _are_numbers(positions) and positions.shape == x.shape[:1]
        if x.dtype not in KINDS or not known:
            return reference.scale_by_position(x, positions, rate, length)
        x, stride, rows, width = _rows(x)
        out = empty(x.shape, x.dtype)
        grow(
            *(x.data_ptr(), stride, positions.data_ptr(), out.data_ptr(), rows, width),
            *(rate, float(length), KINDS[x.dtype]),
        )
        return out

    return {"add": add, "scale": scale, "scale_by_position": scale_by_position}


def _sums_over_rows(library: Library) -> Operations:
    add_squares = library.function("sum_squares", quick=True)
    merge_rows = library.function("pool")
    scale = library.function("normalize", quick=True)

    def sum_squares(x: Tensor, sections: int) -> Tensor:
        if x.dtype not in KINDS:
            return reference.sum_squares(x, sections)
        check_sections("sum_squares", sections)
        if x.shape[-1] % sections:
            refuse("sum_squares", x=x)
        x, stride, rows, width = _rows(x)
        out = empty((rows, 1), torch.float32)
        add_squares(x.data_ptr(), stride, out.data_ptr(), rows, width, sections, KINDS[x.dtype])
        return out

    def pool(rows: Tensor, segments: Segments, mode: str, merge: Merge) -> Tensor:
        kind, places = KINDS.get(rows.dtype), segments.places
        is_table = places.dtype == torch.int32 and places.is_contiguous()
        if kind is None or mode not in _MODES or rows.stride(1) != 1 or not is_table:
            return pooling_ops.pool(rows, segments, mode, merge)
        texts, width = places.shape[0], rows.shape[1]
        out = empty((texts, width), torch.float32)
        given = rows.data_ptr(), rows.stride(0), places.data_ptr(), texts, width
        merge_rows(*given, out.data_ptr(), _MODES[mode], kind)
        return out

    def normalize(rows: Tensor) -> Tensor:
        if rows.dtype != torch.float32 or rows.stride(1) != 1:
            return pooling_ops.normalize(rows)
        out = empty(rows.shape, torch.float32)
        scale(rows.data_ptr(), rows.stride(0), *rows.shape, out.data_ptr())
        return out

    return {"sum_squares": sum_squares, "pool": pool, "normalize": normalize}


def activations(library: Library) -> Operations:
    run = library.function("activation", quick=True)
    curve = library.function("xielu", quick=True)

    def activation(x: Tensor, kind: str) -> Tensor:
        if x.dtype not in KINDS or kind not in FUNCTIONS:
            return torch_operations.activation(x, kind)
        x, stride, rows, width = _rows(x)
        out = empty(x.shape, x.dtype)
        run(x.data_ptr(), stride, out.data_ptr(), rows, width, 0, FUNCTIONS[kind], KINDS[x.dtype])
        return out

    def gated(gate_up: Tensor, kind: str) -> Tensor:
        if gate_up.dtype not in KINDS or kind not in GATES:
            return torch_operations.gated(gate_up, kind)
        if gate_up.shape[-1] % 2:
            refuse("gated", gate_up=gate_up)
        x, stride, rows, width = _rows(gate_up)
        out = empty((*x.shape[:-1], width // 2), x.dtype)
        run(x.data_ptr(), stride, out.data_ptr(), rows, width // 2, 1, GATES[kind], KINDS[x.dtype])
        return out

    def xielu(x: Tensor, curves: Tensor) -> Tensor:
        if curves.shape != (2,) or curves.dtype != torch.float32:
            refuse("xielu", x=x, curves=curves)
        if x.dtype not in KINDS:
            return reference.xielu(x, curves)
        x, stride, rows, width = _rows(x)
        out = empty(x.shape, x.dtype)
        curve(x.data_ptr(), stride, out.data_ptr(), rows, width, curves.data_ptr(), KINDS[x.dtype])
        return out

    return {"activation": activation, "gated": gated, "xielu": xielu}


def _kinds(operation: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[int, int] | None:
    """The kinds of x and of its weights, one for each column; None if the kernels do not know them."""
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


def _are_numbers(x: Tensor) -> bool:
    """Whether the kernels can read these ids or positions [T]."""
    return x.dtype == torch.int64 and x.dim() == 1 and x.is_contiguous()


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
