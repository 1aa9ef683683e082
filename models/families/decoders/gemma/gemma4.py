"""Gemma 4 (text): heads differ by layer, late layers read earlier caches, tokens have vectors for layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec
import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights
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
from models.layers.experts import SavedExperts
from models.layers.linear import frozen
from models.layers.moe import ExpertSpec, MoeMLP
from models.layers.norm import RMSNorm
from models.layers.rotary import Rope, read_rope
from models.model import ModelSetup
from models.ops.expert_routing_ops import Routing
from models.parallel.parallel import Parallel

_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


class OwnHeads(msgspec.Struct, frozen=True):
    """The fields of config.json on the heads of a single layer."""

    head_dim: Size | None = None
    num_key_value_heads: Size | None = None


class Gemma4Fields(SharingFields, frozen=True, kw_only=True):
    global_head_dim: Size = 512
    num_global_key_value_heads: Size | None = None
    """The key/value heads of layers without a window, if those take keys for values; None: as others."""
    per_layer_config: dict[str, OwnHeads] | None = None
    """The heads of single layers by their numbers: newer files have this in place of the fields above."""
    attention_k_eq_v: bool = False
    use_double_wide_mlp: bool = False
    """Whether the MLPs of layers that read another one's cache are twice as wide."""
    enable_moe_block: bool = False
    num_experts: Size | None = None
    top_k_experts: Size | None = None
    moe_intermediate_size: Size | None = None

    def plans(self, setup: ModelSetup) -> list[LayerPlan]:
        config, count = setup.config, setup.config.num_layers
        slides = [self.slides(i, (i + 1) % 6 != 0) for i in range(count - 1)]  # the last layer never does
        kinds = [SLIDING if each else FULL for each in (*slides, False)]
        heads = [self._heads(config, index, kind) for index, kind in enumerate(kinds)]
        owners = [self.owner(index, kinds, heads) for index in range(count)]
        raw = {**config.raw, "rope_parameters": config.raw.get("rope_parameters") or _ROPES}
        return [
            LayerPlan(
                rope=read_rope(raw, head_dim, setup.max_len, layer_type=kind),
                window=self.sliding_window if kind == SLIDING else None,
                head_dim=head_dim,
                kv_heads=kv_heads,
                owner=owner,
                keys_are_values=self.attention_k_eq_v and kind == FULL,
                inner=self.intermediate_size * (2 if self.use_double_wide_mlp and owner is not None else 1),
            )
            for kind, (head_dim, kv_heads), owner in zip(kinds, heads, owners, strict=True)
        ]

    def experts(self, index: int) -> ExpertSpec | None:
        """The experts that every layer has beside its MLP, if any has some."""
        if not self.enable_moe_block:
            return None
        if self.num_experts is None or self.top_k_experts is None or self.moe_intermediate_size is None:
            raise ConfigError(
                "config.json: a Gemma 4 with 'enable_moe_block' needs 'num_experts', 'top_k_experts' and "
                "'moe_intermediate_size'"
            )
        return ExpertSpec(
            routing=Routing(experts=self.num_experts, chosen=self.top_k_experts),
            width=self.moe_intermediate_size,
            activation=self.hidden_activation,
            scope="",
            router="router.proj",
            factors="router.per_expert_scale",
            saved=SavedExperts(in_one=True),
        )

    def _heads(self, config: ModelConfig, index: int, kind: str) -> tuple[int, int]:
        """The width of a layer's heads, and the number of those of keys and values."""
        if self.per_layer_config is not None:
            own = self.per_layer_config.get(str(index), OwnHeads())
        elif kind == FULL:
            kv_heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
            own = OwnHeads(self.global_head_dim, kv_heads)
        else:
            own = OwnHeads()
        return own.head_dim or config.head_dim, own.num_key_value_heads or config.num_kv_heads


class Gemma4UnifiedFields(Gemma4Fields, frozen=True, kw_only=True):
    sliding_window: Size | None = 1024
    hidden_size_per_layer_input: int | None = 0


class LayerScalar(nn.Module):
    """A factor of the stream after a layer."""

    factor: float

    def pull(self, weights: Weights) -> None:
        stored = weights.sibling("").take("layer_scalar", [1], dtype=torch.float32)
        self.factor = 1.0 if stored.is_meta else stored.item()

    def forward(self, stream: Tensor) -> Tensor:
        return ops.scale(stream, self.factor)


class RouterNorm(RMSNorm):
    """The norm of a router's inputs, which divides them by the root of their number besides."""

    def pull(self, weights: Weights) -> None:
        scale = weights.take("scale", [self.size], dtype=torch.float32)
        self.weight = frozen(scale * self.size**-0.5)


class Gemma4Mixture(MoeMLP):
    """The experts beside an MLP, with norms of their own: the stream -> what is added to the MLP's output."""

    def __init__(self, size: int, spec: ExpertSpec, eps: float, parallel: Parallel) -> None:
        super().__init__(size, spec, parallel)
        self.router_norm = RouterNorm(size, eps)
        self.norm_before, self.norm_after = RMSNorm(size, eps), RMSNorm(size, eps)

    def pull(self, weights: Weights) -> None:
        super().pull(weights)
        self.router_norm.pull(weights.sibling("router"))
        self.norm_before.pull(weights.sibling("pre_feedforward_layernorm_2"))
        self.norm_after.pull(weights.sibling("post_feedforward_layernorm_2"))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(self.router_norm(x))
        return self.norm_after(self.experts(self.norm_before(x), *chosen))


class Gemma4Layer(SharingLayer):
    def __init__(
        self,
        config: ModelConfig,
        fields: Gemma4Fields,
        plan: LayerPlan,
        parallel: Parallel,
        owner: Attention | None,
    ) -> None:
        super().__init__(config, fields, plan, parallel, owner)
        size, eps = config.hidden_size, fields.rms_norm_eps
        self.mixture = None
        if (experts := fields.experts(0)) is not None:
            self.post_feedforward_layernorm_1 = RMSNorm(size, eps)
            self.mixture = Gemma4Mixture(size, experts, eps, parallel)
        self.layer_scalar = LayerScalar()

    def forward(self, stream: Tensor, rotations: Mapping[Rope, Tensor], rows: Tensor | None) -> Tensor:
        """stream [T, hidden_size] -> the same; rows [T, width] are the tokens' vectors for this layer."""
        x = self.self_attn(self.input_layernorm(stream), rotations[self.rope])
        x, stream = self.pre_feedforward_layernorm.add(self.post_attention_layernorm(x), stream)
        x = self.mlp(x)
        if self.mixture is not None:
            x = ops.add(self.post_feedforward_layernorm_1(x), self.mixture(stream))
        stream = ops.add(stream, self.post_feedforward_layernorm(x))
        if self.row_gate is not None and rows is not None:
            stream = ops.add(stream, self.row_gate(stream, rows))
        return self.layer_scalar(stream)


class Gemma4ForCausalLM(SharingForCausalLM):
    fields: ClassVar[type[Gemma4Fields]] = Gemma4Fields

    def __init__(self, setup: ModelSetup) -> None:
        fields = family_fields(setup.config, self.fields)
        super().__init__(setup, SharingDecoder(setup, fields, fields.plans(setup), Gemma4Layer), fields)


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    fields = Gemma4UnifiedFields
