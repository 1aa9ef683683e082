"""The base of models whose decoder attends to an encoded source: their fields, their layers, and encoding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from models.config import ModelConfig, Size
from models.context import ForwardContext, use_context
from models.families.decoders.decoder import Decoder, DecoderForCausalLM, DecoderLayer, make_norm
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec, LayerSpec, Norms
from models.families.decoders.gpt import LAYER_NORMS
from models.layers.cross_attention import CrossAttention, SourceInput, cross_layers
from models.layers.embedding import check_learned_positions
from models.layers.norm import enter
from models.layers.rotary import Rope
from models.model import ModelSetup
from models.parallel.parallel import Parallel
from models.towers.tower import InLayers

EPS = 1e-5
NORMS_BEFORE = Norms(before_attention="self_attn_layer_norm", before_mlp="final_layer_norm")


class EncoderDecoderFields(DecoderFields, frozen=True, kw_only=True):
    """The fields of config.json under the names that BART gave them first."""

    intermediate_size: Size = msgspec.field(name="decoder_ffn_dim")
    hidden_act: str = msgspec.field(name="activation_function", default="gelu")
    encoder_ffn_dim: Size
    encoder_layers: Size
    encoder_attention_heads: Size
    scale_embedding: bool = False

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        learned = setup.config.max_len
        check_learned_positions(setup.config.architecture, learned, setup.max_len)
        return replace(
            super().spec(setup, rope),
            eps=EPS,
            norms=NORMS_BEFORE,
            qkv_bias=True,
            o_bias=True,
            mlp_bias=True,
            learned_positions=learned,
            embedding_scale=setup.config.hidden_size**0.5 if self.scale_embedding else 1.0,
        )

    def sees_positions(self, index: int) -> bool:
        return False


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


class EncoderDecoderForCausalLM(DecoderForCausalLM):
    """A decoder of `CrossLayer`s, and an encoder whose results they attend to."""

    fields = EncoderDecoderFields
    fixed = LAYER_NORMS
    layer_class = CrossLayer
    trunks = ("model.decoder", "decoder")
    saved_names = {
        "o_proj": "out_proj",
        "mlp": "",
        "up_proj": "fc1",
        "down_proj": "fc2",
        "norm": "layer_norm",
        "embed_norm": "layernorm_embedding",
    }
    source_kind: ClassVar[Literal["tokens", "audio"]] = "tokens"
    source_len: int
    source_shape: tuple[int, int] = (0, 0)

    def __init__(self, setup: ModelSetup) -> None:
        if setup.parallel.stages > 1:
            raise ValueError(
                "--pipeline-parallel-size: what an encoder gives would have to reach every stage; use "
                "--tensor-parallel-size"
            )
        super().__init__(setup)

    @abstractmethod
    def encoded(self, sources: Sequence[SourceInput], step: ForwardContext) -> InLayers[Tensor]:
        """What the encoder gives of the sources [S, hidden_size], packed as `step` says."""
        ...

    def encode(self, sources: Sequence[SourceInput], step: ForwardContext) -> InLayers[None]:
        states = yield from self.encoded(sources, step)
        with use_context(step):
            for layer in cross_layers(self.modules()):
                layer.write(states)


class TextToTextForCausalLM(EncoderDecoderForCausalLM):
    """One whose encoder has the layers of a decoder, and reads a text in one go."""

    encoder: Decoder

    def encoded(self, sources: Sequence[SourceInput], step: ForwardContext) -> InLayers[Tensor]:
        ids = torch.cat([each.ids for each in sources if each.ids is not None])
        with use_context(step):
            states = self.encoder(ids, step.positions)
        yield from ()  # it is computed without a pause
        return states
