"""BART, mBART, Pegasus and Marian: an encoder reads the tokens of a prompt, and a decoder writes the answer.

The encoder's layers are those of the decoder without attention to a source, and see the whole text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, cast

import msgspec
import torch
from torch import Tensor

from models.checkpoint.weights import Weights, load
from models.config import ConfigError, family_fields
from models.families.decoders.decoder import Decoder, DecoderLayer
from models.families.decoders.decoder_spec import DecoderSpec, Norms
from models.families.decoders.gpt import LAYER_NORMS
from models.families.encoder_decoders.encoder_decoder import EncoderDecoderFields, TextToTextForCausalLM
from models.layers.embedding import Embedding
from models.layers.linear import frozen
from models.layers.rotary import Rope
from models.model import ModelSetup

_FIRST_POSITION = 2  # rows 0 and 1 of the position table were meant for padding
_NORMS_AFTER: dict[str, Any] = {
    "norms": Norms(after_attention="self_attn_layer_norm", after_mlp="final_layer_norm"),
    "norms_sums": True,
    "final_norm": False,
}


class BartFields(EncoderDecoderFields, frozen=True, kw_only=True):
    share_encoder_decoder_embeddings: bool = True

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        if not self.share_encoder_decoder_embeddings:
            raise ConfigError(
                f"config.json of this {setup.config.architecture}: 'share_encoder_decoder_embeddings' is "
                "false, but only models with one vocabulary are served"
            )
        return super().spec(setup, rope)


class BartForConditionalGeneration(TextToTextForCausalLM):
    fields = BartFields
    fixed = {**LAYER_NORMS, **_NORMS_AFTER, "embedding_norm": True}
    has_sinusoids: ClassVar[bool] = False
    """Whether positions are waves, and not learned."""

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(setup)
        own = family_fields(setup.config, BartFields)
        self.source_len = setup.config.max_len
        heads = own.encoder_attention_heads
        reading = msgspec.structs.replace(
            setup.config,
            num_layers=own.encoder_layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=setup.config.hidden_size // heads,
            raw={**setup.config.raw, "is_causal": False, "decoder_ffn_dim": own.encoder_ffn_dim},
        )
        spec = replace(self.spec(replace(setup, config=reading)), **self.fixed)
        self.encoder = Decoder(reading, spec, setup.parallel, DecoderLayer)
        self.encoder.embed_tokens = cast("Decoder", self.model).embed_tokens
        if self.has_sinusoids:
            for trunk in (cast("Decoder", self.model), self.encoder):
                trunk.embed_positions = Sinusoids(
                    self.source_len, setup.config.hidden_size, setup.parallel.undivided
                )
        self.logits_bias: Tensor | None = None  # [vocab_size] float32

    def spec(self, setup: ModelSetup) -> DecoderSpec:
        spec = super().spec(setup)
        if self.has_sinusoids:
            return spec
        rows = spec.learned_positions + _FIRST_POSITION
        return replace(spec, learned_positions=rows, first_position=_FIRST_POSITION)

    def embeddings(self, weights: Weights) -> Weights:
        return weights.first("model.shared", "shared", "model.decoder.embed_tokens", "decoder.embed_tokens")

    def pull(self, weights: Weights) -> None:
        super().pull(weights)
        renamed = weights.renamed(self.saved_names)
        encoder = renamed.first("model.encoder", "encoder")
        for name, module in self.encoder.named_children():
            if name != "embed_tokens":
                load(module, encoder / name)
        for scope in ("model.encoder", "model.decoder", "encoder", "decoder"):  # copies of what is shared
            weights.ignore(f"{scope}.embed_tokens")
        if "final_logits_bias" in weights:
            bias = weights.take("final_logits_bias", [1, self.lm_head.span.size], dtype=torch.float32)[0]
            self.logits_bias = bias if bool(bias.any()) else None

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        return logits if self.logits_bias is None else logits + self.logits_bias


class MBartForConditionalGeneration(BartForConditionalGeneration):
    fixed = {**LAYER_NORMS, "embedding_norm": True}


class MarianMTModel(BartForConditionalGeneration):
    fixed = {**LAYER_NORMS, **_NORMS_AFTER}
    has_sinusoids = True


class PegasusForConditionalGeneration(BartForConditionalGeneration):
    fixed = LAYER_NORMS
    has_sinusoids = True


class Sinusoids(Embedding):
    """A table of positions that is computed: sines in its first half, and cosines in the other."""

    def pull(self, weights: Weights) -> None:
        weights.ignore("weight")
        half = -(-self.size // 2)
        turns = 10000.0 ** (-2 * torch.arange(half, dtype=torch.float64) / self.size)
        angles = torch.arange(self.span.size, dtype=torch.float64).unsqueeze(1) * turns
        table = torch.cat([angles.sin(), angles.cos()[:, : self.size - half]], dim=1)
        self.weight = frozen(table.float().to(weights.device, weights.dtype))
