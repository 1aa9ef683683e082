"""SmolLM3: Llama in which every few layers see no positions."""

from __future__ import annotations

from models.config import family_fields
from models.families.decoders.decoder import DecoderFields, DecoderForCausalLM, LayerSpec
from models.layers.rotary import read_rope
from models.model import ModelSetup


class SmolLM3Fields(DecoderFields, frozen=True, kw_only=True):
    no_rope_layers: tuple[int, ...] | None = None
    """A number for each layer: 1 if it has rope, whatever the field's name says."""
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False

    def has_rope(self, index: int) -> bool:
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[index])
        return (index + 1) % self.no_rope_layer_interval != 0

    def window(self, index: int) -> int | None:
        if self.layer_types is not None:
            slides = self.layer_types[index] == "sliding_attention"
        else:
            slides = not self.has_rope(index)
        return self.sliding_window if self.use_sliding_window and slides else None


class SmolLM3ForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        fields = family_fields(config, SmolLM3Fields)
        rope = read_rope(config.raw, config.head_dim, setup.max_len, default_theta=2000000.0)
        layers = tuple(
            LayerSpec(rope=rope if fields.has_rope(index) else None, window=fields.window(index))
            for index in range(config.num_layers)
        )
        spec = fields.spec(
            config,
            layers,
            qkv_bias=fields.attention_bias,
            o_bias=fields.attention_bias,
            mlp_bias=fields.mlp_bias,
        )
        super().__init__(setup, spec)
