"""EAGLE and EAGLE-3: one layer that reads a token, and hidden states of the model for which it guesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import ConfigError, ModelConfig, Size, family_fields
from models.families.decoders.decoder import DecoderLayer
from models.families.decoders.decoder_attention import DecoderAttention
from models.families.decoders.decoder_spec import DecoderSpec, Norms
from models.families.decoders.llama import LlamaFields
from models.families.drafters.head import DraftHead, spread
from models.layers.embedding import LMHead, TokenEmbedding
from models.layers.linear import Linear
from models.layers.norm import RMSNorm, enter
from models.layers.rotary import Rope
from models.model import ModelSetup
from models.parallel.parallel import Parallel
from models.quantization.matrices import has_matrix


class Eagle(DraftHead):
    """One layer behind a projection of a token and the last hidden state before it."""

    method = "eagle"

    def __init__(self, setup: ModelSetup) -> None:
        config, fields = setup.config, family_fields(setup.config, LlamaFields)
        rope, size = fields.rope(setup), config.hidden_size
        super().__init__(setup, rope)
        own = self.embedding_width
        if config.num_layers != 1 or size != own:
            raise ConfigError(
                f"this EAGLE has {config.num_layers} layers, {size} wide, and must have one, as wide as the "
                f"embeddings of the model that it guesses for, which have {own} numbers"
            )
        norms = Norms(before_mlp="post_attention_layernorm")
        spec = replace(fields.spec(setup, rope), norms=norms)
        self.fc = Linear(2 * size, size)
        self.layer = DecoderLayer(config, spec, spec.layers[0], setup.parallel)

    def pull(self, weights: Weights) -> None:
        trunk = weights.first("model", "")
        trunk.ignore("embed_tokens")  # the other model's
        weights.ignore("lm_head")
        self.fc.has_bias = "bias" in trunk / "fc"
        load(self.fc, trunk / "fc")
        load(self.layer, trunk / "layers.0")
        self.pull_rotary(weights)

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor) -> Tensor:
        x = self.fc(torch.cat([self.embed(ids), stream], dim=-1))
        delta, stream = self.layer(None, x, self.rotations(positions))
        return ops.add(stream, delta)


class EagleConfig(msgspec.Struct, frozen=True):
    """The fields that some checkpoints have in an object of their own."""

    use_aux_hidden_state: bool = True
    """Whether streams of layers are read; otherwise the last hidden states are."""
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    """The layers that these streams leave."""


class Eagle3Fields(LlamaFields, frozen=True, kw_only=True):
    draft_vocab_size: Size | None = None
    """The number of tokens that it can guess; None means all."""
    target_hidden_size: Size | None = None
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    """The layers that the streams enter."""
    norm_before_residual: bool = False
    """Whether the layer adds to what is read after it is normalised."""
    eagle_config: EagleConfig | None = None

    def given_out(self, layers: int) -> tuple[int, ...]:
        """The layers whose incoming streams are read, of a model with so many layers."""
        own = self.eagle_config or EagleConfig()
        if not own.use_aux_hidden_state:
            return ()
        if self.eagle_aux_hidden_state_layer_ids:
            return tuple(sorted(self.eagle_aux_hidden_state_layer_ids))
        if own.eagle_aux_hidden_state_layer_ids:
            return tuple(sorted(layer + 1 for layer in own.eagle_aux_hidden_state_layer_ids))
        return (2, layers // 2, layers - 3)


class Eagle3Layer(DecoderLayer):
    """A decoder's layer whose attention reads the token beside what was read of the one before it."""

    def __init__(
        self, config: ModelConfig, spec: DecoderSpec, parallel: Parallel, *, norms_first: bool
    ) -> None:
        super().__init__(config, spec, spec.layers[0], parallel)
        size, self.norms_first = config.hidden_size, norms_first
        self.self_attn = DecoderAttention(config, spec, spec.layers[0], parallel, 2 * size)
        self.hidden_norm = RMSNorm(size, spec.eps)

    def forward_beside(self, x: Tensor, stream: Tensor, rotations: Mapping[Rope, Tensor]) -> Tensor:
        """Embeddings and what was read before them, [T, H] each -> [T, H]."""
        x, _ = enter(self.before_attention, None, x)
        normed = self.hidden_norm(stream)
        both = torch.cat([x, normed], dim=-1)
        out = self.self_attn(both, rotations[self.rope] if self.rope else None)
        x, stream = enter(self.before_mlp, out, normed if self.norms_first else stream)
        return ops.add(stream, self.feed(x))


class Eagle3(DraftHead):
    """One layer that reads the residual streams of some layers of the other model."""

    method = "eagle3"
    tokens: Tensor | None = None  # [draft_vocab_size] int64: the token that each logit is for; None: its own

    def __init__(self, setup: ModelSetup) -> None:
        config, fields = setup.config, family_fields(setup.config, Eagle3Fields)
        rope = fields.rope(setup)
        super().__init__(setup, rope)
        trunk: Any = self.target.model
        layers, read = trunk.layers.count, self.embedding_width
        read_layers = self.layers_read(setup, layers)
        if config.num_layers != 1 or not set(read_layers) <= set(range(layers)):
            raise ConfigError(
                f"config.json of this EAGLE-3 has {config.num_layers} layers and reads layers "
                f"{list(read_layers)} of a model with {layers}, counted from 0: it must have one, and "
                "read some that are there"
            )
        if fields.target_hidden_size not in (None, read):
            raise ConfigError(
                f"this EAGLE-3 was made for hidden states of {fields.target_hidden_size} numbers, and those "
                f"of the model that it would guess for have {read}"
            )
        spec, size = fields.spec(setup, rope), config.hidden_size
        self.vocab_size = config.vocab_size
        self.fc = Linear(read * len(read_layers), size) if read_layers else None
        self.layer = Eagle3Layer(config, spec, setup.parallel, norms_first=fields.norm_before_residual)
        self.norm = RMSNorm(size, spec.eps)
        self.embed_tokens = TokenEmbedding(config.vocab_size, size, setup.parallel)
        self.lm_head = LMHead(
            fields.draft_vocab_size or config.vocab_size,
            size,
            setup.parallel,
            embedding=self.embed_tokens,
            tied=False,
        )
        self.shares_embeddings = self.shares_head = False

    @staticmethod
    def layers_read(setup: ModelSetup, count: int) -> tuple[int, ...]:
        return family_fields(setup.config, Eagle3Fields).given_out(count)

    def pull(self, weights: Weights) -> None:
        """Read what the checkpoint has; embeddings and a head that it lacks are the other model's."""
        weights.ignore("t2d")
        trunk = weights.first("model", "")
        if self.fc is not None:
            self.fc.has_bias = "bias" in trunk / "fc"
            load(self.fc, trunk / "fc")
        load(self.layer, trunk.first("midlayer", "layers.0"))
        load(self.norm, trunk / "norm")
        self.pull_rotary(weights)
        fits = self.embedding_width == self.width
        self.shares_embeddings = fits and not has_matrix(trunk / "embed_tokens")
        if not self.shares_embeddings:
            load(self.embed_tokens, trunk / "embed_tokens")
        is_whole = self.lm_head.span.size == self.vocab_size
        self.shares_head = fits and is_whole and not has_matrix(weights / "lm_head")
        if not self.shares_head:
            load(self.lm_head, weights / "lm_head")
        if not is_whole:
            count = self.lm_head.span.size
            own = torch.arange(count, device=weights.device)
            shift = weights.stored("d2t", [count], ("int64", "int32")) if weights.is_real else own * 0
            self.tokens = own + shift.long().to(weights.device)

    def read(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        return hidden if self.fc is None else self.fc(torch.cat(list(streams), dim=-1))

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor) -> Tensor:
        return self.layer.forward_beside(self.embed(ids), stream, self.rotations(positions))

    def logits(self, hidden: Tensor) -> Tensor:
        x = self.norm(hidden)
        if self.shares_head:
            return self.target.logits(x)
        own = self.lm_head(x)
        return own if self.tokens is None else spread(own, self.tokens, self.vocab_size)

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) if self.shares_embeddings else self.embed_tokens(ids)
