"""Computes shapes and types of tensors without memory ("meta"), in place of torch's own rules for them.

These are written in Python for most operations, and import torch's compiler and sympy, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten


class ShapesOnly(TorchDispatchMode):
    """Answers for what steps of plain models do beside kernels and products; all else is torch's."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare torch the import of its compiler, which it would keep from here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        given = [each for each in tree_leaves((args, options)) if isinstance(each, Tensor)]
        shape_of = _SHAPES.get(func, _broadcast if torch.Tag.pointwise in func.tags else None)
        by_mask = shape_of is _picked and any(each.dtype == torch.bool for each in given[1:])
        if shape_of is None or by_mask or not any(each.is_meta for each in given):
            return func(*args, **options)
        if func._schema.is_mutable:
            return args[0]
        fill = torch.ones if shape_of is _broadcast else torch.zeros  # no division by 0, no index but 0
        small, few = tree_map_only(
            Tensor, lambda x: fill([1] * x.dim(), dtype=x.dtype), (args, {**options, "device": "cpu"})
        )
        if "device" not in options:
            del few["device"]
        shape = shape_of(*args, **options)
        return tree_map_only(
            Tensor, lambda x: torch.empty(shape, dtype=x.dtype, device="meta"), func(*small, **few)
        )


def _broadcast(*args: Any, **options: Any) -> Sequence[int]:
    given = tree_leaves((args, options))
    return np.broadcast_shapes(*[each.shape for each in given if isinstance(each, Tensor)])


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Sequence[int]:
    shape = [*parts[0].shape]
    shape[dim] = sum(part.shape[dim] for part in parts)
    return shape


def _stacked(parts: Sequence[Tensor], dim: int = 0) -> Sequence[int]:
    shape = [*parts[0].shape]
    shape.insert(dim if dim >= 0 else dim + len(shape) + 1, len(parts))
    return shape


def _multiplied(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Sequence[int]:
    return [*x.shape[:-1], len(weight)]


def _looked_up(weight: Tensor, ids: Tensor, *options: object) -> Sequence[int]:
    return [*ids.shape, *weight.shape[1:]]


def _like(x: Tensor, **options: object) -> Sequence[int]:
    return x.shape


def _picked(x: Tensor, indices: Sequence[Tensor | None]) -> Sequence[int]:
    """The shape of what indices that stand side by side choose."""
    at = [place for place, index in enumerate(indices) if index is not None]
    return [*x.shape[: at[0]], *_broadcast(indices), *x.shape[at[-1] + 1 :]]


_SHAPES: dict[Any, Any] = {
    _aten.cat.default: _joined,
    _aten.stack.default: _stacked,
    _aten.linear.default: _multiplied,
    _aten.embedding.default: _looked_up,
    _aten.empty_like.default: _like,
    _aten.index.Tensor: _picked,
    _aten.__and__.Scalar: _broadcast,
    _aten.__or__.Tensor: _broadcast,
    _aten.where.ScalarSelf: _broadcast,
}
"""How the shapes of results follow, but for those of elementwise operations."""
