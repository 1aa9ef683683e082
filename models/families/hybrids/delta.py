"""Hybrids with linear attention by the delta rule: Qwen3.5, Qwen3-Next, OLMo Hybrid and Kimi Linear."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import msgspec

from models.checkpoint.weights import Weights, load_children
from models.config import ConfigError, Eps, ModelConfig, Size
from models.families.decoders.decoder import DecoderForCausalLM, DecoderLayer
from models.families.decoders.decoder_spec import POST_NORMS, DecoderFields, DecoderSpec, LayerSpec, Norms
from models.families.hybrids.layer_kinds import FULL, LINEAR, check_kinds, layers_of
from models.families.latent import LatentForCausalLM
from models.families.mixtures import DeepSeekExperts, QwenMoeFields
from models.layers.delta import ChannelDeltaSpec, DeltaSpec
from models.layers.experts import SavedExperts
from models.layers.moe import ExpertSpec, SharedExpert
from models.layers.rotary import Rope, read_rope
from models.model import ModelSetup
from models.parallel.parallel import Parallel


class HybridFields(QwenMoeFields, frozen=True, kw_only=True):
    """The fields of layers of both kinds, with the defaults that transformers has for them."""

    full_attention_interval: Size = 4
    linear_conv_kernel_dim: Size = 4
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32
    linear_projections: Literal["by part", "by key head", "gates by key head"] = "by part"
    """How matrices of linear attention lie: GGUF files of Qwen3-Next have them otherwise than its own."""
    linear_value_heads_take_turns: bool = False
    """Whether value heads that share a key head are not neighbours: so GGUF files have them."""

    def rope(self, setup: ModelSetup) -> Rope:
        raw = {"partial_rotary_factor": 0.25, **setup.config.raw}
        return read_rope(raw, setup.config.head_dim, setup.max_len)

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        return layers_of(self, self.kinds(setup.config.num_layers), rope, self.delta())

    def delta(self) -> DeltaSpec:
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ConfigError(
                f"config.json: {self.linear_num_value_heads} value heads cannot share "
                f"{self.linear_num_key_heads} key heads evenly ('linear_num_value_heads' must be a multiple "
                "of 'linear_num_key_heads')"
            )
        return DeltaSpec(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            taps=self.linear_conv_kernel_dim,
            eps=self.rms_norm_eps,
            saved=self.linear_projections,
            takes_turns=self.linear_value_heads_take_turns,
        )

    def kinds(self, count: int) -> tuple[str, ...]:
        """The kinds of so many layers."""
        if self.layer_types is None:
            return tuple(LINEAR if (i + 1) % self.full_attention_interval else FULL for i in range(count))
        return check_kinds(self.layer_types, count, (LINEAR, FULL), "layer_types")

    def experts(self, index: int) -> ExpertSpec | None:
        return None


class HybridMoeFields(HybridFields, frozen=True, kw_only=True):
    """Hybrids with experts in every layer, and one that all tokens take."""

    saved: ClassVar[SavedExperts] = SavedExperts(in_one=True)

    intermediate_size: Size = 1
    """The inner features of MLPs in place of experts, of which most have none."""
    num_experts: int = 256
    num_experts_per_tok: Size = 8
    moe_intermediate_size: Size = 512
    shared_expert_intermediate_size: Size = 512
    norm_topk_prob: bool = True

    def experts(self, index: int) -> ExpertSpec | None:
        return QwenMoeFields.experts(self, index)

    def shared(self) -> SharedExpert:
        return SharedExpert("shared_expert", self.shared_expert_intermediate_size, gate="shared_expert_gate")


class Qwen3NextFields(HybridMoeFields, frozen=True, kw_only=True):
    saved: ClassVar[SavedExperts] = SavedExperts()
    linear_projections: Literal["by part", "by key head", "gates by key head"] = "by key head"
    intermediate_size: Size = 5632
    num_experts: int = 512
    num_experts_per_tok: Size = 10


class Qwen35ForCausalLM(DecoderForCausalLM):
    """Qwen3.5 and Qwen3.6: three layers of linear attention to one of attention."""

    fields = HybridFields
    fixed = {"qk_norm": "head", "norm_offset": 1.0, "output_gate": True}
    saved_names = {"state": "linear_attn", "head_norm": "norm"}
    next_token_scope = "mtp"


class Qwen35MoeForCausalLM(Qwen35ForCausalLM):
    fields = HybridMoeFields


class Qwen3NextForCausalLM(Qwen35ForCausalLM):
    fields = Qwen3NextFields


_LINEAR_NORMS = Norms(before_attention="attention_layer_norm", before_mlp="feedforward_layer_norm")


class OlmoHybridFields(DecoderFields, frozen=True, kw_only=True):
    rope_parameters: dict[str, Any] | None = None
    """The rotation; published models have none, and attention in them sees no positions."""
    linear_num_key_heads: Size | None = None
    linear_num_value_heads: Size | None = None
    linear_key_head_dim: Size | None = None
    linear_value_head_dim: Size | None = None
    linear_conv_kernel_dim: Size = 4
    linear_allow_neg_eigval: bool = True
    """Whether heads learn at rates of up to 2, so that a state may change its sign."""

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        config = setup.config
        count = config.num_layers
        kinds = self.layer_types or tuple(FULL if i % 4 == 3 else LINEAR for i in range(count))
        sees = self.rope_parameters is not None and self.rope_parameters.get("rope_theta") is not None
        kinds = check_kinds(kinds, count, (LINEAR, FULL), "layer_types")
        return layers_of(self, kinds, rope if sees else None, self.delta(config))

    def delta(self, config: ModelConfig) -> DeltaSpec:
        key_heads = self.linear_num_key_heads or config.num_heads
        key_dim = self.linear_key_head_dim or int(0.75 * config.hidden_size / key_heads)
        return DeltaSpec(
            key_heads=key_heads,
            value_heads=self.linear_num_value_heads or config.num_heads,
            key_dim=key_dim,
            value_dim=self.linear_value_head_dim or 2 * key_dim,
            taps=self.linear_conv_kernel_dim,
            eps=1e-5,
            saved="apart",
            most_rate=2.0 if self.linear_allow_neg_eigval else 1.0,
        )


class OlmoHybridLayer(DecoderLayer):
    """A layer whose norms come before its sublayers if it has linear attention, and behind them otherwise."""

    def __init__(self, config: ModelConfig, spec: DecoderSpec, layer: LayerSpec, parallel: Parallel) -> None:
        norms = POST_NORMS if layer.state is None else _LINEAR_NORMS
        super().__init__(config, replace(spec, norms=norms), layer, parallel)

    def pull(self, weights: Weights) -> None:
        """Read the layer. transformers gives the norm behind attention a name of the other layers."""
        if not self.has_state and "feedforward_layer_norm.weight" in weights:
            weights = weights.renamed({POST_NORMS.after_attention: "feedforward_layer_norm"})
        load_children(self, weights)


class OlmoHybridForCausalLM(DecoderForCausalLM):
    """OLMo Hybrid: OLMo 2 in which three layers of four have linear attention, with norms before it."""

    fields = OlmoHybridFields
    fixed = {"qk_norm": "projection"}
    layer_class = OlmoHybridLayer
    saved_names = {
        "state": "linear_attn",
        "in_proj_z": "g_proj",
        "in_proj_b": "b_proj",
        "in_proj_a": "a_proj",
        "head_norm": "o_norm",
        "out_proj": "o_proj",
    }


_KIMI_NAMES, _MIXTURE = {"state": "self_attn"}, "block_sparse_moe"


class LinearFields(msgspec.Struct, frozen=True, kw_only=True):
    """The layers of linear attention in published files."""

    head_dim: Size
    num_heads: Size
    short_conv_kernel_size: Size
    full_attn_layers: tuple[int, ...]
    """The layers that have latent attention instead, counted from 1."""


class KimiLinearFields(DeepSeekExperts, frozen=True, kw_only=True):
    saved: ClassVar[SavedExperts] = SavedExperts(gate="w1", up="w3", down="w2")

    rms_norm_eps: Eps = 1e-5
    n_routed_experts: Size = msgspec.field(name="num_experts", default=256)
    num_experts_per_tok: Size = msgspec.field(name="num_experts_per_token", default=8)
    moe_intermediate_size: Size = 1024
    n_shared_experts: int | None = msgspec.field(name="num_shared_experts", default=1)
    n_group: Size | None = msgspec.field(name="num_expert_group", default=1)
    norm_topk_prob: bool | None = msgspec.field(name="moe_renormalize", default=True)
    routed_scaling_factor: float = 2.446
    first_k_dense_replace: int | None = 1
    moe_router_activation_func: Literal["sigmoid"] = "sigmoid"
    linear_attn_config: LinearFields | None = None
    linear_head_dim: Size = 128
    """This and the next ones are what transformers writes in place of `linear_attn_config`."""
    linear_num_heads: Size = 32
    linear_conv_kernel_dim: Size = 4

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        count = setup.config.num_layers
        kinds = check_kinds(self.kinds(count), count, (LINEAR, FULL), "layer_types")
        return layers_of(self, kinds, None, self.delta())

    def kinds(self, count: int) -> tuple[str, ...]:
        """The kinds of so many layers."""
        if self.layer_types is not None:
            return self.layer_types
        attending = range(5, count + 1, 4)
        if self.linear_attn_config is not None:
            attending = self.linear_attn_config.full_attn_layers
        return tuple(FULL if number in attending else LINEAR for number in range(1, count + 1))

    def delta(self) -> ChannelDeltaSpec:
        sizes = self.linear_head_dim, self.linear_num_heads, self.linear_conv_kernel_dim
        if (published := self.linear_attn_config) is not None:
            sizes = published.head_dim, published.num_heads, published.short_conv_kernel_size
        head_dim, heads, taps = sizes
        return ChannelDeltaSpec(heads=heads, head_dim=head_dim, taps=taps, eps=self.rms_norm_eps)


class KimiLinearLayer(DecoderLayer):
    """A layer whose experts are called otherwise than its MLP, which transformers calls so, too."""

    def pull(self, weights: Weights) -> None:
        if any(f"{_MIXTURE}.{name}.weight" in weights for name in ("gate", "gate_proj")):
            weights = weights.renamed({**_KIMI_NAMES, "mlp": _MIXTURE})
        load_children(self, weights)


class KimiLinearForCausalLM(LatentForCausalLM):
    """Kimi Linear: Kimi delta attention, latent attention that sees no positions, and experts."""

    fields = KimiLinearFields
    layer_class = KimiLinearLayer
    turns_neighbours = False
    ties_head = False
    saved_names = _KIMI_NAMES
