"""Decoders with Mamba in place of attention, or beside it: Bamba, Granite 4, Falcon-H1 and Jamba."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Annotated, Literal

import msgspec
from torch import Tensor

from models import ops
from models.config import ConfigError, Eps, ModelConfig, Size, family_fields
from models.families.decoders.decoder import DecoderForCausalLM, DecoderLayer
from models.families.decoders.decoder_attention import DecoderAttention
from models.families.decoders.decoder_spec import WITHOUT_BIASES, DecoderFields, DecoderSpec, LayerSpec, Norms
from models.families.decoders.llama import LlamaFields
from models.families.hybrids.layer_kinds import FULL, LINEAR, Silu, check_kinds, layers_of
from models.families.mixtures import GraniteMoeFields
from models.layers.mamba import ChannelScanSpec, MambaSpec, Multipliers
from models.layers.moe import ExpertSpec
from models.layers.rotary import Rope, read_rope
from models.model import ModelSetup
from models.ops.expert_routing_ops import Routing
from models.parallel.parallel import Parallel


class MambaFields(msgspec.Struct, frozen=True, kw_only=True):
    """The names that several families have for the sizes of Mamba-2, with the defaults of transformers."""

    mamba_n_heads: Size = 128
    mamba_d_head: Size | Literal["auto"] = "auto"
    mamba_n_groups: Size = 1
    mamba_d_state: Size = 256
    mamba_d_conv: Size = 4
    mamba_expand: Size = 2
    """The features of a layer's heads by the hidden size."""
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, float] | None = None

    def mamba(self, features: int, eps: float) -> MambaSpec:
        """A layer whose heads have so many features together."""
        heads = self.mamba_n_heads
        head_dim = features // heads if self.mamba_d_head == "auto" else self.mamba_d_head
        if heads * head_dim != features:
            raise ConfigError(
                f"config.json: {heads} Mamba heads ('mamba_n_heads') of {head_dim} ('mamba_d_head') do not "
                f"make the {features} features of a layer"
            )
        return MambaSpec(
            heads=heads,
            head_dim=head_dim,
            groups=self.mamba_n_groups,
            state_size=self.mamba_d_state,
            taps=self.mamba_d_conv,
            eps=eps,
            bias=self.mamba_proj_bias,
            out_bias=self.mamba_proj_bias,
            conv_bias=self.mamba_conv_bias,
            limits=self.time_step_limit or (0.0, inf),
        )


def mixed_layers(
    fields: DecoderFields, config: ModelConfig, kinds: Sequence[str], rope: Rope | None
) -> tuple[LayerSpec, ...]:
    """Make layers of these kinds, of which those without attention have Mamba-2 in its place."""
    mamba = None
    if LINEAR in kinds:  # files of models that have attention alone may hold other models' sizes
        sizes = family_fields(config, MambaFields)
        mamba = sizes.mamba(sizes.mamba_expand * config.hidden_size, fields.rms_norm_eps)
    return layers_of(fields, kinds, rope, mamba)


_NORMS = Norms(before_attention="input_layernorm", before_mlp="pre_ff_layernorm")
_NAMES = {"state": "mamba", "mlp": "feed_forward", "norm": "final_layernorm"}


class BambaFields(LlamaFields, frozen=True, kw_only=True):
    rms_norm_eps: Eps = 1e-5
    attn_layer_indices: tuple[int, ...] | None = None
    """The layers with attention."""

    def rope(self, setup: ModelSetup) -> Rope:
        raw = {**setup.config.raw, "partial_rotary_factor": 0.5}
        return read_rope(raw, setup.config.head_dim, setup.max_len)

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        attending = self.attn_layer_indices or ()
        kinds = [FULL if index in attending else LINEAR for index in range(setup.config.num_layers)]
        return mixed_layers(self, setup.config, kinds, rope)


class BambaForCausalLM(DecoderForCausalLM):
    """Bamba: Llama in which most layers have Mamba-2 in place of attention."""

    fields = BambaFields
    fixed = {"norms": _NORMS}
    saved_names = _NAMES


class GraniteHybridFields(GraniteMoeFields, frozen=True, kw_only=True):
    num_local_experts: int = 8
    """The experts of a layer; 0 means that the expert that all tokens share is an MLP of its own."""
    num_experts_per_tok: int = 2
    """The experts of a token, which is 0 in files without experts."""
    shared_intermediate_size: int = 1024
    position_embedding_type: str | None = None
    """The word "rope" where layers with attention see positions."""

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), intermediate_size=self.shared_intermediate_size)

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        count = setup.config.num_layers
        kinds = (LINEAR,) * count if self.layer_types is None else self.layer_types
        kinds = check_kinds(kinds, count, (LINEAR, FULL), "layer_types")
        seen = rope if self.position_embedding_type == "rope" else None
        return mixed_layers(self, setup.config, kinds, seen)

    def experts(self, index: int) -> ExpertSpec | None:
        return super().experts(index) if self.num_local_experts else None


class GraniteMoeHybridForCausalLM(DecoderForCausalLM):
    """Granite 4: Granite in which most layers have Mamba-2, with MLPs or experts."""

    fields = GraniteHybridFields
    fixed = {"gate_up_in_one": True}
    saved_names = {
        "state": "mamba",
        "mlp": "shared_mlp",
        "gate_up_proj": "input_linear",
        "down_proj": "output_linear",
    }


_Factor = Annotated[float, msgspec.Meta(gt=0)]


class FalconH1Fields(LlamaFields, frozen=True, kw_only=True):
    hidden_act: Silu = "silu"
    rms_norm_eps: Eps = 1e-5
    mamba_d_ssm: Size | None = 1024
    """The features of a layer's heads; None: `mamba_expand` times the hidden size."""
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    projectors_bias: bool = False
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    ssm_multipliers: tuple[float, float, float, float, float] | None = None
    """Factors of gates, values, keys, queries and time steps."""
    mlp_multipliers: tuple[_Factor, float] | None = None
    """Factors of gates, and of what an MLP writes."""

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        spec = super().spec(setup, rope)
        if self.mlp_bias and self.gate_factor != 1.0:
            raise ConfigError(
                "config.json: 'mlp_bias' and factors of gates ('mlp_multipliers') are not served together"
            )
        return replace(
            spec,
            attention_scale=spec.attention_scale * self.key_multiplier,
            embedding_scale=self.embedding_multiplier,
            logit_scale=self.lm_head_multiplier,
        )

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        return (LayerSpec(rope=rope, state=self.mamba(setup.config)),) * setup.config.num_layers

    def mamba(self, config: ModelConfig) -> MambaSpec:
        sizes = family_fields(config, MambaFields)
        features = self.mamba_d_ssm or sizes.mamba_expand * config.hidden_size
        norm = "before gates" if self.mamba_norm_before_gate else "gated"
        return replace(
            sizes.mamba(features, self.rms_norm_eps),
            norm=norm if self.mamba_rms_norm else None,
            out_bias=self.projectors_bias,
            multipliers=Multipliers(*self.ssm_multipliers or ()),
        )

    @property
    def gate_factor(self) -> float:
        return self.mlp_multipliers[0] if self.mlp_multipliers else 1.0

    @property
    def mlp_factor(self) -> float:
        return self.mlp_multipliers[1] if self.mlp_multipliers else 1.0


class FalconH1Layer(DecoderLayer):
    """A layer whose attention and Mamba-2 read the same, and add up what they write."""

    def __init__(self, config: ModelConfig, spec: DecoderSpec, layer: LayerSpec, parallel: Parallel) -> None:
        super().__init__(config, spec, layer, parallel)
        self.self_attn = DecoderAttention(config, spec, layer, parallel)
        self.factors = family_fields(config, FalconH1Fields)

    def mix(self, x: Tensor, cos_sin: Tensor | None) -> Tensor:
        factors = self.factors
        scanned = self.state(_scaled(x, factors.ssm_in_multiplier))
        attended = self.self_attn(_scaled(x, factors.attention_in_multiplier), cos_sin)
        return ops.add(
            _scaled(scanned, factors.ssm_out_multiplier), _scaled(attended, factors.attention_out_multiplier)
        )

    def feed(self, x: Tensor) -> Tensor:
        """The MLP. Its input takes the factor of gates, which is taken back behind it for the values."""
        factor = self.factors.gate_factor
        return _scaled(self.mlp(_scaled(x, factor)), self.factors.mlp_factor / factor)


class FalconH1ForCausalLM(DecoderForCausalLM):
    """Falcon-H1: attention and Mamba-2 side by side, with factors of what both read and write."""

    fields = FalconH1Fields
    fixed = {"norms": _NORMS}
    saved_names = _NAMES
    layer_class = FalconH1Layer


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else ops.scale(x, factor)


class JambaFields(DecoderFields, frozen=True, kw_only=True):
    num_experts: Size = 16
    """The experts of layers with some; 1 means that all have an MLP."""
    num_experts_per_tok: Size = 2
    expert_layer_period: Size = 2
    expert_layer_offset: int = 1
    attn_layer_period: Size = 8
    attn_layer_offset: int = 4
    mamba_d_state: Size = 16
    mamba_d_conv: Size = 4
    mamba_expand: Size = 2
    mamba_dt_rank: Size | Literal["auto"] = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        size = setup.config.hidden_size
        scan = ChannelScanSpec(
            channels=self.mamba_expand * size,
            state_size=self.mamba_d_state,
            rank=-(-size // 16) if self.mamba_dt_rank == "auto" else self.mamba_dt_rank,
            taps=self.mamba_d_conv,
            bias=self.mamba_proj_bias,
            conv_bias=self.mamba_conv_bias,
            norm="weighted",
            eps=self.rms_norm_eps,
        )
        period, offset, count = self.attn_layer_period, self.attn_layer_offset, setup.config.num_layers
        kinds = [FULL if index % period == offset else LINEAR for index in range(count)]
        return layers_of(self, kinds, None, scan)

    def experts(self, index: int) -> ExpertSpec | None:
        if self.num_experts == 1 or index % self.expert_layer_period != self.expert_layer_offset:
            return None
        chosen = self.num_experts_per_tok
        return ExpertSpec(
            routing=Routing(experts=self.num_experts, chosen=chosen, normalised=False),
            width=self.intermediate_size,
            activation=self.hidden_act,
            router="router",
        )


class JambaForCausalLM(DecoderForCausalLM):
    """Jamba: the first Mamba in most layers, attention without positions in others, MLPs or experts."""

    fields = JambaFields
    fixed = {"norms": _NORMS, **WITHOUT_BIASES}
    saved_names = _NAMES
