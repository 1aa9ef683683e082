"""Gemma 3n (text): tokens have several streams, of which layers compute one and correct all (AltUp)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load_children
from models.config import ConfigError, ModelConfig, Size, family_fields
from models.families.decoders.gemma.gemma_layers import (
    FULL,
    SLIDING,
    LayerPlan,
    SharingDecoder,
    SharingFields,
    SharingForCausalLM,
    SharingLayer,
)
from models.layers.attention import Attention
from models.layers.linear import Linear, frozen
from models.layers.norm import RMSNorm
from models.layers.rotary import Rope, read_rope
from models.layers.stages import if_held
from models.model import ModelSetup
from models.parallel.parallel import Parallel
from models.quantization.matrices import read_plain_matrix

_LEAST_SQUARE = 1e-5
"""The mean square below which a stream is not made larger."""


class Gemma3nFields(SharingFields, frozen=True, kw_only=True):
    intermediate_size: Size | tuple[Size, ...]  # pyright: ignore[reportIncompatibleVariableOverride]
    """The inner features of all MLPs, or of each."""
    final_logit_softcapping: float | None = 30.0
    num_kv_shared_layers: int = 15
    altup_num_inputs: Annotated[int, msgspec.Meta(ge=2, le=64)] = 4
    altup_active_idx: Annotated[int, msgspec.Meta(ge=0)] = 0
    altup_correct_scale: bool = True
    laurel_rank: Size = 64
    activation_sparsity_pattern: tuple[Annotated[float, msgspec.Meta(ge=0, lt=1)], ...] | None = None
    rope_local_base_freq: float = 10_000.0
    rope_parameters: dict[str, Any] | None = None

    def plans(self, setup: ModelSetup) -> list[LayerPlan]:
        config, count = setup.config, setup.config.num_layers
        if self.altup_active_idx >= self.altup_num_inputs:
            raise ConfigError("config.json: 'altup_active_idx' must be less than 'altup_num_inputs'")
        kinds = [SLIDING if self.slides(i, (i + 1) % 5 != 0) else FULL for i in range(count)]
        ropes = {kind: self._rope(setup, kind) for kind in kinds}
        heads = [(config.head_dim, config.num_kv_heads)] * count
        sizes, closed = self.intermediate_size, self.activation_sparsity_pattern
        sizes = sizes if isinstance(sizes, tuple) else (sizes,) * count
        if closed is None:
            closed = tuple(0.95 if count > 10 > index else 0.0 for index in range(count))
        if not len(sizes) == len(closed) == count:
            raise ConfigError(
                "config.json: 'intermediate_size' and 'activation_sparsity_pattern' must have a number for "
                f"each of the {count} layers"
            )
        return [
            LayerPlan(
                rope=ropes[kind],
                window=self.sliding_window if kind == SLIDING else None,
                head_dim=config.head_dim,
                kv_heads=config.num_kv_heads,
                owner=self.owner(index, kinds, heads),
                inner=sizes[index],
                sparsity=closed[index],
            )
            for index, kind in enumerate(kinds)
        ]

    def _rope(self, setup: ModelSetup, kind: str) -> Rope:
        """The rotation of a kind of layers; older files have a field of its own for those with a window."""
        raw, head_dim = setup.config.raw, setup.config.head_dim
        theta = self.rope_local_base_freq if kind == SLIDING else 1_000_000.0
        if kind == SLIDING and kind not in (self.rope_parameters or {}):
            raw = {"rope_theta": theta}
        return read_rope(raw, head_dim, setup.max_len, layer_type=kind, default_theta=theta)


class Streams(nn.ModuleList):
    """Matrices between the first of a token's streams and the others, made as large as the first."""

    def __init__(self, size: int, others: int) -> None:
        super().__init__(Linear(size, size) for _ in range(others))

    def forward(self, first: Tensor, others: Iterable[Tensor]) -> list[Tensor]:
        """The first stream [T, size], and what is made of each of `others` by the next matrix."""
        wanted = self._mean_square(first).sqrt()
        streams = [first]
        for matrix, x in zip(self, others, strict=True):
            made: Tensor = matrix(x)
            factor = wanted / self._mean_square(made).clamp(min=_LEAST_SQUARE).sqrt()
            streams.append((made.float() * factor).to(made.dtype))
        return streams

    @staticmethod
    def _mean_square(x: Tensor) -> Tensor:
        return ops.sum_squares(x, 1) / x.shape[1]


class AltUp(nn.Module):
    """Predicts the streams of a token ahead of a layer, and corrects them behind it."""

    prediction: nn.Parameter  # [count * count, count] float32
    correction: nn.Parameter  # [count, count] float32
    output_scale: nn.Parameter  # [size]

    def __init__(self, size: int, fields: Gemma3nFields) -> None:
        super().__init__()
        self.size, self.count, self.active = size, fields.altup_num_inputs, fields.altup_active_idx
        self.is_scaled = fields.altup_correct_scale
        self.router_norm = RMSNorm(size, fields.rms_norm_eps)
        self.modality_router = Linear(size, self.count, plain=True)

    def pull(self, weights: Weights) -> None:
        load_children(self, weights)
        count, wide = self.count, torch.float32
        scope = weights / "prediction_coefs"
        self.prediction = frozen(read_plain_matrix(scope, (count * count, count), None, wide))
        self.correction = frozen(read_plain_matrix(weights / "correction_coefs", (count, count), None, wide))
        self.output_scale = frozen(weights.take("correct_output_scale", [self.size]))

    def predict(self, streams: Tensor) -> Tensor:
        """streams [T, count * size] -> the same."""
        return ops.predict_streams(streams, self._route(self.computed(streams)), self.prediction)

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """predicted [T, count * size], computed [T, size] -> streams [T, count * size]."""
        routed = self._route(computed)
        return ops.correct_streams(predicted, computed, routed, self.correction, self.active)

    def computed(self, streams: Tensor) -> Tensor:
        """The stream that layers compute, [T, size]."""
        return streams[:, self.active * self.size : (self.active + 1) * self.size]

    def output(self, streams: Tensor) -> Tensor:
        """The same, as gates of tokens' vectors read it."""
        computed = self.computed(streams)
        return computed * self.output_scale if self.is_scaled else computed

    def _route(self, x: Tensor) -> Tensor:
        return ops.scale(self.modality_router(self.router_norm(x)), 1 / self.size)


class Laurel(nn.Module):
    """A learned residual layer of low rank beside attention."""

    def __init__(self, size: int, fields: Gemma3nFields) -> None:
        super().__init__()
        self.linear_left = Linear(size, fields.laurel_rank)
        self.linear_right = Linear(fields.laurel_rank, size)
        self.post_laurel_norm = RMSNorm(size, fields.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        return ops.add(x, self.post_laurel_norm(self.linear_right(self.linear_left(x))))


class Gemma3nLayer(SharingLayer):
    def __init__(
        self,
        config: ModelConfig,
        fields: Gemma3nFields,
        plan: LayerPlan,
        parallel: Parallel,
        owner: Attention | None,
    ) -> None:
        super().__init__(config, fields, plan, parallel, owner)
        self.altup, self.laurel = AltUp(config.hidden_size, fields), Laurel(config.hidden_size, fields)

    def forward(self, streams: Tensor, rotations: Mapping[Rope, Tensor], rows: Tensor | None) -> Tensor:
        """streams [T, count * size] -> the same; rows [T, width] are the tokens' vectors for this layer."""
        predicted = self.altup.predict(streams)
        stream = self.altup.computed(predicted)
        x = self.input_layernorm(stream)
        attended = self.post_attention_layernorm(self.self_attn(x, rotations[self.rope]))
        stream = ops.scale(ops.add(ops.add(stream, attended), self.laurel(x)), 2**-0.5)
        x = self.mlp(self.pre_feedforward_layernorm(stream))
        stream = ops.add(stream, self.post_feedforward_layernorm(x))
        streams = self.altup.correct(predicted, stream)
        if self.row_gate is not None and rows is not None:
            added = self.row_gate(self.altup.output(streams), rows)
            streams.unflatten(1, (self.altup.count, -1))[:, 1:] += added.unsqueeze(1)
        return streams


class Gemma3nDecoder(SharingDecoder):
    """The trunk, which makes streams of embeddings and one of all streams at the end."""

    def __init__(self, setup: ModelSetup, fields: Gemma3nFields) -> None:
        size, count = setup.config.hidden_size, fields.altup_num_inputs
        super().__init__(setup, fields, fields.plans(setup), Gemma3nLayer, count)
        self.count = count
        self.altup_projections = if_held(setup.parallel.first, Streams(size, count - 1))
        self.altup_unembed_projections = if_held(setup.parallel.last, Streams(size, count - 1))

    def enter(self, embedded: Tensor) -> Tensor:
        return torch.cat(self.altup_projections(embedded, [embedded] * (self.count - 1)), dim=1)

    def leave(self, x: Tensor) -> Tensor:
        first, *others = x.chunk(self.count, dim=1)
        total = first
        for other in self.altup_unembed_projections(first, others)[1:]:
            total = ops.add(total, other)
        return ops.scale(total, 1 / self.count)


class Gemma3nForCausalLM(SharingForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        fields = family_fields(setup.config, Gemma3nFields)
        super().__init__(setup, Gemma3nDecoder(setup, fields), fields)
