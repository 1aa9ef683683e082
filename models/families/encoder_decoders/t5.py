"""T5, Flan-T5, mT5 and UMT5: an encoder and a decoder that know positions by distances, without a limit.

Checkpoints have the stages of a layer under numbers: attention, attention to the source, and the MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, cast

import msgspec

from models.checkpoint.weights import Weights, load
from models.config import ConfigError, Eps, Size, family_fields
from models.families.decoders.decoder import Decoder, DecoderLayer
from models.families.decoders.decoder_attention import DecoderAttention
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec, Norms
from models.families.encoder_decoders.encoder_decoder import CrossLayer, TextToTextForCausalLM
from models.families.encoders.encoder_model import EncoderModel
from models.layers.attention import Buckets, read_bias
from models.layers.rotary import Rope
from models.model import ModelSetup
from models.parallel.rank_shares import Span
from models.pooling.sentence_files import Mode

_NAMES = {
    "layers": "block",
    "norm": "final_layer_norm",
    "self_attn": "layer.0.SelfAttention",
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_proj": "wi_0",
    "down_proj": "wo",
}
_SHARED = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
"""The scopes of the embeddings, of which a checkpoint may have copies."""


class T5Fields(DecoderFields, frozen=True, kw_only=True):
    scales: ClassVar[bool] = True
    """Whether models with one matrix for embeddings and logits scale what they multiply it with."""

    intermediate_size: Size = msgspec.field(name="d_ff")
    rms_norm_eps: Eps = msgspec.field(name="layer_norm_epsilon", default=1e-6)
    encoder_layers: Size = msgspec.field(name="num_layers")
    feed_forward_proj: str = "relu"
    relative_attention_num_buckets: Size = 32
    relative_attention_max_distance: Size = 128
    tie_word_embeddings: bool | None = None
    scale_decoder_outputs: bool | None = None
    """What newer files say, whose `tie_word_embeddings` is true whatever the model has."""

    @property
    def is_gated(self) -> bool:
        return self.feed_forward_proj.startswith("gated-")

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        gated, size = self.is_gated, setup.config.hidden_size
        kind = self.feed_forward_proj.removeprefix("gated-")
        ties = self.tie_word_embeddings is not False
        scaled = self.scales and (ties if self.scale_decoder_outputs is None else self.scale_decoder_outputs)
        ahead = setup.config.raw.get("is_causal") is False
        return replace(
            super().spec(setup, rope),
            activation="gelu_new" if gated and kind == "gelu" else kind,
            is_gated=gated,
            attention_scale=1.0,
            biased=True,
            norms=Norms("layer.0.layer_norm", "", "layer.1.layer_norm" if ahead else "layer.2.layer_norm"),
            logit_scale=size**-0.5 if scaled and not ahead else 1.0,
        )

    def sees_positions(self, index: int) -> bool:
        return False

    def names(self, mlp: str) -> dict[str, str]:
        """What checkpoints call modules of a stack whose layers have their MLP at this place."""
        up = "wi_1" if self.is_gated else "wi"
        return {**_NAMES, "mlp": f"layer.{mlp}.DenseReluDense", "up_proj": up}

    def buckets(self, *, ahead: bool) -> Buckets:
        count, reach = self.relative_attention_num_buckets, self.relative_attention_max_distance
        near = (count // 2 if ahead else count) // 2
        if not 0 < near < reach:
            raise ConfigError(
                f"config.json: 'relative_attention_num_buckets' {count} are too few, or too many for a "
                f"'relative_attention_max_distance' of {reach}"
            )
        return Buckets(count, reach, ahead)


class MT5Fields(T5Fields, frozen=True, kw_only=True):
    scales = False


class T5Encoder(Decoder):
    """The layers that read a text, which are those of the decoder without attention to a source."""

    def __init__(self, setup: ModelSetup) -> None:
        own = family_fields(setup.config, T5Fields)
        raw = {**setup.config.raw, "is_causal": False}
        config = msgspec.structs.replace(setup.config, num_layers=own.encoder_layers, raw=raw)
        self.own, self.heads = own, setup.parallel.share_heads(setup.config.num_heads)
        spec = own.spec(replace(setup, config=config), own.rope(setup))
        super().__init__(config, spec, setup.parallel, DecoderLayer)

    def read(self, weights: Weights, *, embeddings: bool) -> None:
        """Read the checkpoint; `embeddings`: those too, which are not the decoder's."""
        scope = weights.renamed(self.own.names("1")) / "encoder"
        for name, module in self.named_children():
            if name != "embed_tokens":
                load(module, scope / name)
            elif embeddings:
                load(module, weights.first(*_SHARED))
        for name in _SHARED:  # copies of what is shared
            weights.ignore(name)
        _read_biases(self, self.heads, self.own.buckets(ahead=True), scope)


class T5Layer(CrossLayer):
    cross_names = ("layer.1.layer_norm", "o_proj")


class T5ForConditionalGeneration(TextToTextForCausalLM):
    fields = T5Fields
    fixed = {}
    layer_class = T5Layer
    trunks = ("decoder",)

    def __init__(self, setup: ModelSetup) -> None:
        # The checkpoint says by its tensors whether the head has a matrix of its own; its config need not.
        super().__init__(
            replace(setup, config=msgspec.structs.replace(setup.config, tie_word_embeddings=None))
        )
        self.own = family_fields(setup.config, T5Fields)
        self.heads = setup.parallel.share_heads(setup.config.num_heads)
        self.saved_names = {**self.own.names("2"), "encoder_attn": "layer.1.EncDecAttention"}
        self.source_len = setup.max_len
        self.encoder = T5Encoder(setup)
        self.encoder.embed_tokens = cast("Decoder", self.model).embed_tokens

    def embeddings(self, weights: Weights) -> Weights:
        return weights.first(*_SHARED)

    def pull(self, weights: Weights) -> None:
        super().pull(weights)
        scope = weights.renamed(self.saved_names) / "decoder"
        weights.ignore("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias")  # read by nobody
        _read_biases(cast("Decoder", self.model), self.heads, self.own.buckets(ahead=False), scope)
        cast("T5Encoder", self.encoder).read(weights, embeddings=False)


class MT5ForConditionalGeneration(T5ForConditionalGeneration):
    fields = MT5Fields


class T5EncoderModel(EncoderModel):
    """An encoder alone, which sentence-t5 and GTR make vectors with."""

    default_pooling: Mode = "MEAN"

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(T5Encoder(setup))

    def pull(self, weights: Weights) -> None:
        weights.ignore("decoder", "lm_head")
        cast("T5Encoder", self.trunk).read(weights, embeddings=True)


def _read_biases(stack: Decoder, heads: Span, buckets: Buckets, weights: Weights) -> None:
    """Read what layers add to scores by distance: that of the first one, but for those with their own."""
    for number, layer in zip(stack.layers.numbers, stack.layers, strict=True):
        of_layers = [weights / "layers" / str(each) / "self_attn" for each in (number, 0)]
        scopes = [each / "relative_attention_bias" for each in of_layers]
        scope = scopes["weight" not in scopes[0]]
        attention = cast("DecoderAttention", cast("DecoderLayer", layer).self_attn).attention
        attention.bias = read_bias(scope, heads, buckets)
