"""Falcon-H1: attention and Mamba-2 side by side in each layer, with factors of what both read and write."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec
from torch import Tensor

from models import ops
from models.config import ConfigError, Eps, ModelConfig, Size, family_fields
from models.families.decoders.decoder import DecoderForCausalLM, DecoderLayer
from models.families.decoders.decoder_attention import DecoderAttention
from models.families.decoders.decoder_spec import DecoderSpec, LayerSpec
from models.families.decoders.llama import LlamaFields
from models.families.hybrids.bamba import NAMES, NORMS
from models.families.hybrids.mamba_fields import MambaFields
from models.layers.mamba import MambaSpec, Multipliers
from models.layers.rotary import Rope
from models.model import ModelSetup
from models.parallel.parallel import Parallel

_Factor = Annotated[float, msgspec.Meta(gt=0)]


class FalconH1Fields(LlamaFields, frozen=True, kw_only=True):
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
    fields = FalconH1Fields
    fixed = {"norms": NORMS}
    saved_names = NAMES
    layer_class = FalconH1Layer


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else ops.scale(x, factor)
