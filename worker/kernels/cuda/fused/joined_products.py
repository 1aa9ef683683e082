"""Products of up to eight rows that are joined with what comes before and behind them.

The reference computes more rows, and what the kernels do not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.context import ForwardContext
from models.ops import fused_ops
from models.ops.attention_inputs import AS_PROJECTED, UNSCALED, CacheScales, HeadPrep
from worker.kernels.cuda.capabilities import Card, joined_tiles
from worker.kernels.cuda.fused.decoder_layer import fused_layer
from worker.kernels.cuda.fused.few_row_kernels import add_product, project_gates, project_heads
from worker.kernels.cuda.launch import EARLY, begins_early, joined, launch, padded
from worker.kernels.cuda.linear import GATES

_PROGRAMS, _MOST_SPLITS = 4, 16
"""The programs for each multiprocessor that splits of inputs lead to at most, and the most splits."""


JOINED = {"fused_layer", "project_heads", "project_gates", "add_product", "attention", "rotary_and_cache"}
"""The operations that must be right for steps to be computed by joined kernels."""


def operations(card: Card) -> dict[str, Callable[..., Any]]:
    """The operations of this room by name, for `models.ops.use`."""
    kernels = _Joined(card)
    return {
        "fused_layer": fused_layer,
        "project_heads": kernels.project_heads,
        "project_gates": kernels.project_gates,
        "add_product": kernels.add_product,
    }


@dataclass(frozen=True)
class _Joined:
    card: Card

    def project_heads(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor,
        kv: Tensor,
        step: ForwardContext,
        bias: Tensor | None = None,
        prep: HeadPrep = AS_PROJECTED,
        scales: CacheScales = UNSCALED,
    ) -> Tensor:
        counters, tiles = joined(), joined_tiles(x.dtype)
        if counters is None or prep.v_norm is not None or len(x) > tiles.rows:
            return fused_ops.project_heads(x, norm, eps, weight, kv, step, bias, prep, scales)
        keys, dim, cos_sin = kv.shape[2], kv.shape[-1], prep.cos_sin
        heads = len(weight) // dim
        out = torch.empty(len(x), heads - 2 * keys, dim, dtype=x.dtype, device=x.device)
        projected = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
        count = heads * -(-dim // tiles.outputs)
        splits, partial = self._parts(count, x, len(weight))
        launch(
            project_heads,
            (count, splits),
            *(x, norm, weight, bias, projected, partial, counters, out, kv[0], kv[1], step.slot_mapping),
            *(cos_sin, prep.q_norm, prep.k_norm, len(x), x.shape[1], eps, prep.eps),
            *(scales.keys, scales.values, heads - 2 * keys, keys, dim, padded(dim), step.block_size),
            *(0 if cos_sin is None else cos_sin.shape[1],),
            *(torch.finfo(kv.dtype).max if kv.dtype.itemsize == 1 else 0.0,),
            *(splits, tiles.rows, len(x) == 1, tiles.outputs, tiles.inputs, self._depends),
            **self._options(tiles.warps, tiles.stages),
        )
        return out

    def project_gates(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        counters, tiles, width = joined(), joined_tiles(x.dtype), len(weight) // 2
        if counters is None or len(x) > tiles.rows:
            return fused_ops.project_gates(x, norm, eps, weight, kind, bias)
        count = -(-width // tiles.outputs)
        splits, partial = self._parts(count, x, len(weight))
        out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
        launch(
            project_gates,
            (count, splits),
            *(x, norm, weight, bias, out, partial, counters, len(x), x.shape[1], width, eps),
            *(GATES[kind], splits, tiles.rows, len(x) == 1, 2 * tiles.outputs, tiles.inputs, self._depends),
            **self._options(2 * tiles.warps, tiles.stages),
        )
        return out

    def add_product(self, x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        counters, tiles, outputs = joined(), joined_tiles(x.dtype), len(weight)
        if counters is None or len(x) > tiles.rows:
            return fused_ops.add_product(x, weight, residual, bias)
        count = -(-outputs // tiles.outputs)
        splits, partial = self._parts(count, x, outputs)
        out = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
        launch(
            add_product,
            (count, splits),
            *(x, weight, bias, residual, out, partial, counters, len(x), x.shape[1], outputs),
            *(splits, tiles.rows, tiles.outputs, tiles.inputs, self._depends),
            **self._options(tiles.warps, tiles.stages),
        )
        return out

    @property
    def _depends(self) -> bool:
        return begins_early(self.card)

    def _options(self, warps: int, stages: int) -> dict[str, int]:
        return {"num_warps": warps, "num_stages": stages, **(EARLY if self._depends else {})}

    def _parts(self, count: int, x: Tensor, outputs: int) -> tuple[int, Tensor]:
        """The splits of inputs, by a number that does not depend on rows, and room for their sums."""
        most = min(_MOST_SPLITS, -(-x.shape[1] // joined_tiles(x.dtype).inputs))
        splits = 1
        while 2 * splits <= most and 2 * splits * count <= _PROGRAMS * self.card.processors:
            splits *= 2
        return splits, torch.empty(splits, len(x), outputs, dtype=torch.float32, device=x.device)
