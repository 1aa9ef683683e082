"""The decoder that families share: attention and an MLP, each with its norms, on one stream.

A family is a `DecoderSpec`, which its own file makes of its own fields of config.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.composites import HEADS, TRUNKS
from models.config import ModelConfig, family_fields
from models.context import context
from models.conversion.conversion_choice import looks_ahead
from models.families.decoders.decoder_attention import DecoderAttention
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec, LayerSpec
from models.layers.attention import CachedAttention
from models.layers.embedding import Embedding, LMHead, TokenEmbedding
from models.layers.latent_attention import LatentSelfAttention
from models.layers.linear import Linear
from models.layers.mlp import GATE_AND_UP, MLP, GatedMLP
from models.layers.moe import MoeMLP
from models.layers.norm import LayerNorm, Norm, RMSNorm, enter
from models.layers.rotary import Rope, Rotary
from models.layers.stages import Layers, if_held
from models.layers.state import StateLayer
from models.model import ModelSetup
from models.parallel.parallel import Parallel
from models.quantization.matrices import has_matrix


class DecoderLayer(nn.Module):
    """One layer. The residual stream comes in two pieces: `stream`, and `delta`, which is still to be added.

    So adding up and normalising the sum, which always follow each other, are one operation.
    """

    def __init__(self, config: ModelConfig, spec: DecoderSpec, layer: LayerSpec, parallel: Parallel) -> None:
        super().__init__()
        self.rope = layer.rope
        self.residual_scale = spec.residual_scale
        self.is_parallel = spec.is_parallel
        self.norms_sums = spec.norms_sums
        self.before_attention = self._norm(spec.norms.before_attention, config, spec)
        if layer.state is None:
            self.self_attn = _attention(config, spec, layer, parallel)
        else:
            self.state = layer.state.build(config.hidden_size, parallel)
        self.has_state = layer.state is not None
        self.after_attention = self._norm(spec.norms.after_attention, config, spec)
        self.before_mlp = self._norm(spec.norms.before_mlp, config, spec)
        self.mlp = _mlp(config, spec, layer, parallel)
        self.after_mlp = self._norm(spec.norms.after_mlp, config, spec)

    def forward(
        self, delta: Tensor | None, stream: Tensor, rotations: Mapping[Rope, Tensor]
    ) -> tuple[Tensor | None, Tensor]:
        cos_sin = rotations[self.rope] if self.rope else None
        if (left := ops.fused_layer(self, delta, stream, cos_sin)) is not None:
            return None, left
        x, stream = enter(self.before_attention, delta, stream)  # [T, hidden_size] each, here and below
        out = self.mix(x, cos_sin)
        if self.is_parallel:
            x = x if self.before_mlp is None else self.before_mlp(stream)
            return ops.add(out, self.feed(x)), stream
        delta, stream = self._leave(self.after_attention, out, stream)
        x, stream = enter(self.before_mlp, delta, stream)
        return self._leave(self.after_mlp, self.feed(x), stream)

    def mix(self, x: Tensor, cos_sin: Tensor | None) -> Tensor:
        """The first sublayer, in which tokens read of those before them."""
        return self.state(x) if self.has_state else self.self_attn(x, cos_sin)

    def feed(self, x: Tensor) -> Tensor:
        """The second sublayer, which computes each token alone."""
        return self.mlp(x)

    def _leave(self, norm: Norm | None, x: Tensor, stream: Tensor) -> tuple[Tensor | None, Tensor]:
        """Finish a sublayer that computed `x` -> (what is still to be added, the stream)."""
        if norm is not None and self.norms_sums:
            return None, norm.add(x, stream)[0]
        x = norm(x) if norm else x
        return x if self.residual_scale == 1.0 else ops.scale(x, self.residual_scale), stream

    @staticmethod
    def _norm(source: str, config: ModelConfig, spec: DecoderSpec) -> Norm | None:
        return make_norm(config.hidden_size, spec, source) if source else None


class Decoder(nn.Module):
    """The trunk: token ids -> hidden states. A stage does its part of that."""

    given_out: tuple[int, ...] = ()
    """The layers for which a step's context gets the residual streams that enter them, in the last stage."""

    def __init__(
        self, config: ModelConfig, spec: DecoderSpec, parallel: Parallel, layer_class: type[nn.Module]
    ) -> None:
        super().__init__()
        size, width = config.hidden_size, spec.embedding_width or config.hidden_size
        self.embed_tokens = TokenEmbedding(config.vocab_size, width, parallel, scale=spec.embedding_scale)
        self.embed_norm = if_held(parallel.first, make_norm(size, spec)) if spec.embedding_norm else None
        if width != size:
            self.project_in = if_held(parallel.first, Linear(width, size))
            self.project_out = if_held(parallel.last, Linear(size, width))
        self.is_projected = width != size
        self.size, self.is_last = size, parallel.last
        if spec.learned_positions:
            learned, undivided = spec.learned_positions, parallel.undivided
            self.embed_positions = Embedding(learned, size, undivided, plain=True)
        self.first_position = spec.first_position if spec.learned_positions else None
        self.layers = Layers(
            len(spec.layers),
            parallel,
            lambda number: layer_class(config, spec, spec.layers[number], parallel),
        )
        self.norm = if_held(parallel.last, make_norm(size, spec) if spec.final_norm else nn.Identity())
        ropes = dict.fromkeys(layer.rope for layer in spec.layers if layer.rope)
        self.rotaries = nn.ModuleList(Rotary(rope) for rope in ropes)

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        axes = context().axes
        turning = positions if axes is None else axes
        rotations = {rotary.rope: rotary(turning) for rotary in self.rotaries}
        rows, streams = self._begin(ids, positions, stream)
        delta: Tensor | None = None
        media = context().media if stream is None else None
        for number, layer in zip(self.layers.numbers, self.layers, strict=True):
            if number in self.given_out:
                streams.append(rows if delta is None else ops.add(rows, delta))
            delta, rows = layer(delta, rows, rotations)
            if media is not None and number < len(media.deeper):
                rows = rows.index_add(0, media.places, media.deeper[number])
        hidden, _ = enter(self.norm, delta, rows)
        hidden = self.project_out(hidden) if self.is_projected else hidden
        if not self.is_last:
            return torch.cat([hidden, *streams], dim=-1) if streams else hidden
        if self.given_out:
            context().streams = streams
        return hidden

    @property
    def stream_size(self) -> int:
        """The numbers of a token that the stage before hands on: streams given out so far follow its own."""
        return self.size * (1 + sum(number in self.given_out for number in range(self.layers.numbers.start)))

    def _begin(self, ids: Tensor, positions: Tensor, stream: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """The residual stream before the first layer here, and those that earlier stages have given out."""
        if stream is None:
            return self._embed(ids, positions), []
        if not self.given_out:
            return stream, []
        rows, *streams = stream.split(self.size, dim=-1)
        return rows.contiguous(), streams

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        rows = self.embed_tokens(ids)
        rows = self.project_in(rows) if self.is_projected else rows
        if self.first_position is not None:
            rows = ops.add(rows, ops.embed(positions, self.embed_positions.weight[self.first_position :]))
        return rows if self.embed_norm is None else self.embed_norm(rows)


class TrunkForCausalLM(nn.Module):
    """A trunk and the LM head behind it, which may share the matrix of the trunk's embeddings."""

    ties_head: ClassVar[bool] = True
    """Whether `tie_word_embeddings` counts if the checkpoint has a head, which else wins."""

    def __init__(
        self, setup: ModelSetup, trunk: nn.Module, embedding: Embedding, *, head_bias: bool = False
    ) -> None:
        super().__init__()
        self.model = trunk
        self.lm_head = LMHead(
            setup.config.vocab_size,
            embedding.size,
            setup.parallel,
            embedding=embedding,
            tied=setup.config.tie_word_embeddings and (self.ties_head or None),
            tokens=setup.head_tokens,
            bias=head_bias,
        )

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        return self.model(ids, positions, stream)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)  # [R, vocab_size] float32

    def attention_layers(self) -> list[CachedAttention]:
        layers = (module for module in self.modules() if isinstance(module, CachedAttention))
        return [layer for layer in layers if layer.owns_cache]


class HeadFirstForCausalLM(TrunkForCausalLM):
    """A trunk of modules with their own names in the checkpoint, whose logits may be scaled and capped."""

    trunks: ClassVar[tuple[str, ...]] = TRUNKS
    """The scopes in which a checkpoint may have the trunk."""
    saved_names: Mapping[str, str] = {}
    """What the family's checkpoints call modules, by the names that they have here."""

    def __init__(
        self,
        setup: ModelSetup,
        trunk: nn.Module,
        embedding: Embedding,
        *,
        head_bias: bool = False,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
    ) -> None:
        super().__init__(setup, trunk, embedding, head_bias=head_bias)
        has_states = any(isinstance(module, StateLayer) for module in trunk.modules())
        self.causal = has_states or not looks_ahead(setup.config)
        self.logit_scale = logit_scale
        self.logit_softcap = logit_softcap

    def pull(self, weights: Weights) -> None:
        """Read the head behind the embeddings, which it may share, and ahead of the layers.

        Of all matrices it takes the most memory while it is packed: there is room for that as long as the
        layers are not there.
        """
        weights = weights.renamed(self.saved_names)
        trunk = weights.first(*self.trunks)
        for name, module in self.model.named_children():
            load(module, self.embeddings(weights) if name == "embed_tokens" else trunk / name)
            if name == "embed_tokens":
                load(self.lm_head, weights.first(*HEADS))

    def embeddings(self, weights: Weights) -> Weights:
        """The scope of the embeddings of tokens. What is tied may be saved under the head's name alone."""
        own, head = weights.first(*self.trunks) / "embed_tokens", weights.first(*HEADS)
        return head if self.lm_head.tied is not False and has_matrix(head) and not has_matrix(own) else own

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head(hidden)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = self.logit_softcap * torch.tanh(logits / self.logit_softcap)
        return logits


class DecoderForCausalLM(HeadFirstForCausalLM):
    """A family of this decoder: its class names the struct that reads its fields of config.json."""

    fields: ClassVar[type[DecoderFields]] = DecoderFields
    fixed: ClassVar[Mapping[str, Any]] = {}
    """What the spec of every model of the family has, by its fields' names, whatever config.json says."""
    layer_class: ClassVar[type[nn.Module]] = DecoderLayer
    """The class of layers, which is called and computes as `DecoderLayer`."""
    next_token_scope: ClassVar[str] = ""
    """The scope of layers for multi-token prediction; "": they lie behind the last layer, if there are."""

    def __init__(self, setup: ModelSetup) -> None:
        spec = replace(self.spec(setup), **self.fixed)
        trunk = Decoder(setup.config, spec, setup.parallel, self.layer_class)
        super().__init__(
            setup,
            trunk,
            trunk.embed_tokens,
            head_bias=spec.head_bias,
            logit_scale=spec.logit_scale,
            logit_softcap=spec.logit_softcap,
        )

    @property
    def stream_size(self) -> int:
        trunk: Any = self.model
        return trunk.stream_size

    def spec(self, setup: ModelSetup) -> DecoderSpec:
        fields = family_fields(setup.config, self.fields)
        return fields.spec(setup, fields.rope(setup))


def make_norm(size: int, spec: DecoderSpec, source: str = "") -> Norm:
    """A norm of the stream; `source` is its name in the checkpoint, if that is not the module's own."""
    if spec.norm == "rms":
        return RMSNorm(size, spec.eps, source=source, offset=spec.norm_offset)
    weighted = spec.norm == "layer"
    return LayerNorm(
        size, spec.eps, bias=spec.norm_bias, source=source, offset=spec.norm_offset, weighted=weighted
    )


def _attention(
    config: ModelConfig, spec: DecoderSpec, layer: LayerSpec, parallel: Parallel
) -> DecoderAttention | LatentSelfAttention:
    if spec.latent is None:
        return DecoderAttention(config, spec, layer, parallel)
    if looks_ahead(config):
        raise ValueError(f"{config.architecture} with latent attention cannot attend in both directions")
    return LatentSelfAttention(
        *(config.hidden_size, config.num_heads, spec.latent, parallel),
        scale=spec.attention_scale,
        growth=spec.query_growth,
        shares_choice=layer.shares_choice,
    )


def _mlp(config: ModelConfig, spec: DecoderSpec, layer: LayerSpec, parallel: Parallel) -> nn.Module:
    if layer.experts is not None:
        return MoeMLP(config.hidden_size, layer.experts, parallel)
    if not spec.is_gated:
        return MLP(
            config.hidden_size,
            spec.intermediate_size,
            parallel,
            activation=spec.activation,
            names=("up_proj", "down_proj"),
            bias=spec.mlp_bias,
            transposed=spec.transposed,
        )
    return GatedMLP(
        config.hidden_size,
        spec.intermediate_size,
        parallel,
        activation=spec.activation,
        bias=spec.mlp_bias,
        sources=GATE_AND_UP,
        names=("gate_up_proj", "down_proj") if spec.gate_up_in_one else None,
    )


def lm_head(modules: Iterable[nn.Module]) -> LMHead | None:
    """The LM head of a model that generates, among its modules."""
    return next((each.lm_head for each in modules if isinstance(each, TrunkForCausalLM)), None)
