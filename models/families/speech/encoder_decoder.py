"""What decoders share that answer to a source: attention to it between attention and the MLP of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from models.config import ModelConfig
from models.families.decoders.decoder import DecoderLayer, make_norm
from models.families.decoders.decoder_spec import DecoderSpec, LayerSpec
from models.layers.cross_attention import CrossAttention
from models.layers.norm import enter
from models.layers.rotary import Rope
from models.parallel.parallel import Parallel


class CrossLayer(DecoderLayer):
    """A layer whose sublayers have norms before them, or behind them where those of `spec` are there."""

    cross_names: ClassVar[tuple[str, str]] = ("encoder_attn_layer_norm", "out_proj")
    """The names of the norm of attention to the source, and of its last projection."""

    def __init__(self, config: ModelConfig, spec: DecoderSpec, layer: LayerSpec, parallel: Parallel) -> None:
        super().__init__(config, spec, layer, parallel)
        norm, output = self.cross_names
        self.cross_norm = make_norm(config.hidden_size, spec, norm)
        self.encoder_attn = CrossAttention(
            config, parallel, scale=spec.attention_scale, bias=spec.qkv_bias, output=output
        )

    def forward(
        self, delta: Tensor | None, stream: Tensor, rotations: Mapping[Rope, Tensor]
    ) -> tuple[Tensor | None, Tensor]:
        cos_sin = rotations[self.rope] if self.rope else None
        x, stream = enter(self.before_attention, delta, stream)  # [T, hidden_size] each, here and below
        delta, stream = self._leave(self.after_attention, self.mix(x, cos_sin), stream)
        before, after = (None, self.cross_norm) if self.norms_sums else (self.cross_norm, None)
        x, stream = enter(before, delta, stream)
        delta, stream = self._leave(after, self.encoder_attn(x), stream)
        x, stream = enter(self.before_mlp, delta, stream)
        return self._leave(self.after_mlp, self.feed(x), stream)
