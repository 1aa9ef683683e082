"""OLMo Hybrid: OLMo 2 in which three layers of four have linear attention, with norms before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from models.checkpoint.weights import Weights, load
from models.config import ModelConfig, Size
from models.families.decoders.decoder import DecoderForCausalLM, DecoderLayer
from models.families.decoders.decoder_spec import POST_NORMS, DecoderFields, DecoderSpec, LayerSpec, Norms
from models.families.hybrids.layer_kinds import FULL, LINEAR, check_kinds
from models.layers.delta import DeltaSpec
from models.layers.rotary import Rope
from models.model import ModelSetup
from models.parallel.parallel import Parallel

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
        delta = self.delta(config)
        return tuple(
            LayerSpec(rope=None, state=delta) if kind == LINEAR else LayerSpec(rope=rope if sees else None)
            for kind in check_kinds(kinds, count, (LINEAR, FULL), "layer_types")
        )

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
        for name, module in self.named_children():
            load(module, weights / name)


class OlmoHybridForCausalLM(DecoderForCausalLM):
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
