"""Gemma 4 (text): heads differ by layer, late layers read earlier caches, tokens have vectors for layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import ConfigError, ModelConfig, Size, family_fields
from models.conversion.conversion_choice import looks_ahead
from models.families.decoders.decoder import HeadFirstForCausalLM
from models.families.decoders.decoder_spec import DecoderFields
from models.layers.attention import Attention
from models.layers.embedding import Embedding
from models.layers.experts import SavedExperts
from models.layers.linear import Linear, RowLinear, frozen
from models.layers.mlp import GATE_AND_UP, GatedMLP, activation_kind
from models.layers.moe import ExpertSpec, MoeMLP
from models.layers.norm import PlainRMSNorm, RMSNorm
from models.layers.rotary import Rope, Rotary, read_rope
from models.layers.stages import Layers, if_held
from models.model import ModelSetup
from models.ops.attention_inputs import HeadPrep
from models.ops.expert_ops import Routing
from models.parallel.parallel import Parallel

_SLIDING, _FULL = "sliding_attention", "full_attention"
_ROPES = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """The facts that differ from layer to layer."""

    rope: Rope
    window: int | None
    head_dim: int
    kv_heads: int
    owner: int | None
    """The number of the layer whose cache this one reads; None means that it has its own."""
    keys_are_values: bool
    """Whether values are what the projection of keys gives."""
    inner: int
    """The inner features of the MLP."""


class OwnHeads(msgspec.Struct, frozen=True):
    """What config.json says of the heads of a single layer."""

    head_dim: Size | None = None
    num_key_value_heads: Size | None = None


class Gemma4Fields(DecoderFields, frozen=True, kw_only=True):
    hidden_activation: str = "gelu_pytorch_tanh"
    final_logit_softcapping: float | None = None
    sliding_window: Size | None = 512
    global_head_dim: Size = 512
    num_global_key_value_heads: Size | None = None
    """The key/value heads of layers without a window, if those take keys for values; None: as others."""
    per_layer_config: dict[str, OwnHeads] | None = None
    """The heads of single layers by their numbers: newer files have this in place of the fields above."""
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    """The number of last layers that read the cache of another one."""
    use_double_wide_mlp: bool = False
    """Whether the MLPs of those layers are twice as wide."""
    hidden_size_per_layer_input: int | None = 256
    """The width of the vectors that tokens have for each layer; 0 and None mean that there are none."""
    vocab_size_per_layer_input: Size = 262_144
    enable_moe_block: bool = False
    num_experts: Size | None = None
    top_k_experts: Size | None = None
    moe_intermediate_size: Size | None = None

    def plans(self, setup: ModelSetup) -> list[LayerPlan]:
        config, count = setup.config, setup.config.num_layers
        slides = [self.slides(i, (i + 1) % 6 != 0) for i in range(count - 1)]  # the last layer never does
        kinds = [_SLIDING if each else _FULL for each in (*slides, False)]
        heads = [self._heads(config, index, kind) for index, kind in enumerate(kinds)]
        owners = [self._owner(index, kinds, heads) for index in range(count)]
        raw = {**config.raw, "rope_parameters": config.raw.get("rope_parameters") or _ROPES}
        return [
            LayerPlan(
                rope=read_rope(raw, head_dim, setup.max_len, layer_type=kind),
                window=self.sliding_window if kind == _SLIDING else None,
                head_dim=head_dim,
                kv_heads=kv_heads,
                owner=owner,
                keys_are_values=self.attention_k_eq_v and kind == _FULL,
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
        elif kind == _FULL:
            kv_heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
            own = OwnHeads(self.global_head_dim, kv_heads)
        else:
            own = OwnHeads()
        return own.head_dim or config.head_dim, own.num_key_value_heads or config.num_kv_heads

    def _owner(self, index: int, kinds: list[str], heads: list[tuple[int, int]]) -> int | None:
        first = len(kinds) - self.num_kv_shared_layers
        if index < first:
            return None
        owner = next((i for i in reversed(range(first)) if kinds[i] == kinds[index]), None)
        if owner is None or heads[owner] != heads[index]:
            raise ConfigError(
                f"config.json: layer {index} must read the cache of a layer before the last "
                f"{self.num_kv_shared_layers} ('num_kv_shared_layers') of its kind ({kinds[index]}) with the "
                "same heads, and there is none"
            )
        return owner


class Gemma4UnifiedFields(Gemma4Fields, frozen=True, kw_only=True):
    sliding_window: Size | None = 1024
    hidden_size_per_layer_input: int | None = 0


class Gemma4Attention(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        fields: Gemma4Fields,
        plan: LayerPlan,
        parallel: Parallel,
        owner: Attention | None,
    ) -> None:
        super().__init__()
        heads, kv_heads = parallel.share_heads(config.num_heads), parallel.share_kv_heads(plan.kv_heads)
        q, kv = heads.times(plan.head_dim), kv_heads.times(plan.head_dim)
        parts = {"q_proj": q}
        if owner is None:
            parts |= {"k_proj": kv} if plan.keys_are_values else {"k_proj": kv, "v_proj": kv}
        self.qkv_proj = Linear(
            config.hidden_size, [*parts.values()], bias=fields.attention_bias, sources=[*parts]
        )
        self.o_proj = RowLinear(q, config.hidden_size, parallel, bias=fields.attention_bias)
        self.attention = Attention(
            heads=heads.length,
            kv_heads=kv_heads.length,
            head_dim=plan.head_dim,
            scale=1.0,
            window=plan.window,
            owner=owner,
        )
        self.q_norm = RMSNorm(plan.head_dim, fields.rms_norm_eps)
        # Published files have the projections of keys and values in all layers.
        self.ignored = () if owner is None else ("k_proj", "v_proj", "k_norm")
        if owner is None:
            self.k_norm = RMSNorm(plan.head_dim, fields.rms_norm_eps)
            self.v_norm = PlainRMSNorm(plan.head_dim, fields.rms_norm_eps)

    def forward(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        q, *others = self.qkv_proj(x).split(self.qkv_proj.widths, dim=-1)
        norm = self.q_norm
        if not others:
            prep = HeadPrep(cos_sin, norm.weight, eps=norm.eps)
            return self.o_proj(self.attention.read(q, prep))
        prep = HeadPrep(cos_sin, norm.weight, self.k_norm.weight, norm.eps, self.v_norm.weight)
        return self.o_proj(self.attention(q, others[0], others[-1], prep))


class LayerScalar(nn.Module):
    """A factor of the stream after a layer."""

    factor: float

    def pull(self, weights: Weights) -> None:
        stored = weights.sibling("").take("layer_scalar", [1], dtype=torch.float32)
        self.factor = 1.0 if stored.is_meta else stored.item()

    def forward(self, stream: Tensor) -> Tensor:
        return ops.scale(stream, self.factor)


class TokenRows(nn.Module):
    """The vectors of a step's tokens for all layers, side by side, of their ids and their embeddings."""

    def __init__(self, config: ModelConfig, fields: Gemma4Fields, width: int, parallel: Parallel) -> None:
        super().__init__()
        self.width, total = width, width * config.num_layers
        self.embed_tokens_per_layer = Embedding(
            fields.vocab_size_per_layer_input, total, parallel, scale=width**0.5
        )
        self.per_layer_model_projection = Linear(config.hidden_size, total)
        # The projection is divided by the root of the hidden size, which the norm undoes but for this.
        self.per_layer_projection_norm = RMSNorm(width, fields.rms_norm_eps * config.hidden_size)

    def pull(self, weights: Weights) -> None:
        for name, module in self.named_children():
            load(module, weights.sibling(name))

    def forward(self, ids: Tensor, embedded: Tensor) -> Tensor:
        """ids [T], embedded [T, hidden_size] -> [T, layers * width]."""
        projected = self.per_layer_model_projection(embedded)
        by_layer = projected.view(len(projected), -1, self.width)
        norm = self.per_layer_projection_norm
        normed = ops.rotate(by_layer, None, norm.weight, norm.eps).flatten(1)
        return ops.scale(ops.add(normed, self.embed_tokens_per_layer(ids)), 2**-0.5)


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


class Gemma4Layer(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        fields: Gemma4Fields,
        plan: LayerPlan,
        parallel: Parallel,
        owner: Attention | None,
    ) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, fields.rms_norm_eps)

        self.rope = plan.rope
        self.input_layernorm = norm()
        self.self_attn = Gemma4Attention(config, fields, plan, parallel, owner)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        activation = fields.hidden_activation
        self.mlp = GatedMLP(
            config.hidden_size, plan.inner, parallel, activation=activation, sources=GATE_AND_UP
        )
        self.mixture = None
        if (experts := fields.experts(0)) is not None:
            self.post_feedforward_layernorm_1 = norm()
            self.mixture = Gemma4Mixture(config.hidden_size, experts, fields.rms_norm_eps, parallel)
        self.post_feedforward_layernorm = norm()
        self.kind = activation_kind(activation)
        if width := fields.hidden_size_per_layer_input:
            self.per_layer_input_gate = Linear(config.hidden_size, width)
            self.per_layer_projection = Linear(width, config.hidden_size)
            self.post_per_layer_input_norm = norm()
        self.layer_scalar = LayerScalar()

    def forward(self, stream: Tensor, rotations: Mapping[Rope, Tensor], rows: Tensor | None) -> Tensor:
        """stream [T, hidden_size] -> the same; rows [T, width] are the tokens' vectors for this layer."""
        x = self.self_attn(self.input_layernorm(stream), rotations[self.rope])
        x, stream = self.pre_feedforward_layernorm.add(self.post_attention_layernorm(x), stream)
        x = self.mlp(x)
        if self.mixture is not None:
            x = ops.add(self.post_feedforward_layernorm_1(x), self.mixture(stream))
        stream = ops.add(stream, self.post_feedforward_layernorm(x))
        if rows is not None:
            x = self.per_layer_projection(ops.gate(rows, self.per_layer_input_gate(stream), self.kind))
            stream = ops.add(stream, self.post_per_layer_input_norm(x))
        return self.layer_scalar(stream)


class Gemma4Decoder(nn.Module):
    """The trunk: token ids -> hidden states. A stage does its part of that."""

    def __init__(self, setup: ModelSetup, fields: Gemma4Fields) -> None:
        super().__init__()
        config, parallel = setup.config, setup.parallel
        plans, width = fields.plans(setup), fields.hidden_size_per_layer_input
        _check_stages(config, plans, parallel, has_rows=bool(width))
        size = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, size, parallel, scale=size**0.5)
        self.rows = TokenRows(config, fields, width, parallel) if width else None
        owners: dict[int | None, Attention] = {}

        def make(number: int) -> nn.Module:
            plan = plans[number]
            layer = Gemma4Layer(config, fields, plan, parallel, owners.get(plan.owner))
            owners[number] = layer.self_attn.attention
            return layer

        self.layers = Layers(len(plans), parallel, make)
        self.norm = if_held(parallel.last, RMSNorm(size, fields.rms_norm_eps))
        self.rotaries = nn.ModuleList(Rotary(rope) for rope in dict.fromkeys(plan.rope for plan in plans))

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        rotations = {rotary.rope: rotary(positions) for rotary in self.rotaries}
        stream = self.embed_tokens(ids) if stream is None else stream
        rows: list[Tensor | None] = [None] * len(self.layers)
        if self.rows is not None:
            rows = [*self.rows(ids, stream).split(self.rows.width, dim=-1)]
        for layer, own in zip(self.layers, rows, strict=True):
            stream = layer(stream, rotations, own)
        return self.norm(stream)


class Gemma4ForCausalLM(HeadFirstForCausalLM):
    fields: ClassVar[type[Gemma4Fields]] = Gemma4Fields

    def __init__(self, setup: ModelSetup) -> None:
        fields = family_fields(setup.config, self.fields)
        if looks_ahead(setup.config) or setup.config.raw.get("use_bidirectional_attention") == "all":
            raise ConfigError(f"{setup.config.architecture} is not served with attention in both directions")
        trunk = Gemma4Decoder(setup, fields)
        softcap = fields.final_logit_softcapping
        super().__init__(setup, trunk, trunk.embed_tokens, logit_softcap=softcap)


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    fields = Gemma4UnifiedFields


def _check_stages(config: ModelConfig, plans: list[LayerPlan], parallel: Parallel, *, has_rows: bool) -> None:
    """Refuse a cut into stages that parts layers from the caches, or tokens' vectors, that they read."""
    held = parallel.share_layers(len(plans))
    if parallel.stages > 1 and has_rows:
        raise ValueError(
            f"--pipeline-parallel-size {parallel.stages}: the layers of this {config.architecture} read "
            "vectors of tokens that the first stage would keep ('hidden_size_per_layer_input'); choose 1, "
            "and --tensor-parallel-size for more ranks"
        )
    for number in held:
        if (owner := plans[number].owner) is not None and owner not in held:
            raise ValueError(
                f"--pipeline-parallel-size {parallel.stages}: layer {number} of this {config.architecture} "
                f"reads the cache of layer {owner}, which another stage would hold; choose less, and "
                "--tensor-parallel-size for more ranks"
            )
