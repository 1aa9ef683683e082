"""The layers of Gemma 3n and 4: late ones read earlier caches, and tokens have vectors for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import ConfigError, ModelConfig, Size
from models.context import context
from models.conversion.conversion_choice import looks_ahead
from models.families.decoders.decoder import HeadFirstForCausalLM
from models.families.decoders.decoder_spec import DecoderFields
from models.layers.attention import Attention
from models.layers.embedding import Embedding, TokenEmbedding
from models.layers.linear import Linear, RowLinear
from models.layers.mlp import GATE_AND_UP, GatedMLP, SparseMLP, activation_kind
from models.layers.norm import PlainRMSNorm, RMSNorm
from models.layers.rotary import Rope, Rotary
from models.layers.stages import Layers, if_held
from models.model import ModelSetup
from models.ops.attention_inputs import HeadPrep
from models.parallel.parallel import Parallel
from models.parallel.rank_shares import Span

SLIDING, FULL = "sliding_attention", "full_attention"
_DIGITS = 3
"""The digits to the base 256, which all number types hold exactly, that name a token between stages."""


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """The facts that differ from layer to layer."""

    rope: Rope
    window: int | None
    head_dim: int
    kv_heads: int
    owner: int | None
    """The number of the layer whose cache this one reads; None means that it has its own."""
    keys_are_values: bool = False
    """Whether values are what the projection of keys gives."""
    inner: int
    """The inner features of the MLP."""
    sparsity: float = 0.0
    """The part of the MLP's gates that is closed for each token."""


class SharingFields(DecoderFields, frozen=True, kw_only=True):
    hidden_activation: str = "gelu_pytorch_tanh"
    final_logit_softcapping: float | None = None
    sliding_window: Size | None = 512
    num_kv_shared_layers: int = 0
    """The number of last layers that read the cache of another one."""
    hidden_size_per_layer_input: int | None = 256
    """The width of the vectors that tokens have for each layer; 0 and None mean that there are none."""
    pad_token_id: Annotated[int, msgspec.Meta(ge=0)] | None = 0
    """The token whose vectors for layers media have."""
    vocab_size_per_layer_input: Size = 262_144
    """The number of tokens that have such vectors; the others have those of the first."""

    def owner(self, index: int, kinds: Sequence[str], heads: Sequence[tuple[int, int]]) -> int | None:
        """The layer whose cache a layer reads, the last of its kind that has one; None means its own.

        `heads`: the width of each layer's heads, and the number of those of keys and values.
        """
        first = len(kinds) - self.num_kv_shared_layers
        if index < first:
            return None
        owner = next((i for i in reversed(range(first)) if kinds[i] == kinds[index]), None)
        if owner is None or heads[owner] != heads[index]:
            raise ConfigError(
                f"config.json: layer {index} must read the cache of a layer before the last "
                f"{self.num_kv_shared_layers} ('num_kv_shared_layers') of its kind ({kinds[index]}) with the "
                "same heads, and there is none"
            )
        return owner


def layers_together(plans: Sequence[LayerPlan]) -> int:
    """The number of last layers that one stage must hold: those that read a cache, and its owners."""
    owners = [plan.owner for plan in plans if plan.owner is not None]
    return len(plans) - min(owners) if owners else 1


class SharingAttention(nn.Module):
    """Attention with norms of heads, by a cache of its own or by that of an earlier layer, `owner`."""

    def __init__(
        self,
        config: ModelConfig,
        fields: SharingFields,
        plan: LayerPlan,
        parallel: Parallel,
        owner: Attention | None,
    ) -> None:
        super().__init__()
        heads, kv_heads = parallel.share_heads(config.num_heads), parallel.share_kv_heads(plan.kv_heads)
        q, kv = heads.times(plan.head_dim), kv_heads.times(plan.head_dim)
        parts = {"q_proj": q}
        if owner is None:
            parts |= {"k_proj": kv} if plan.keys_are_values else {"k_proj": kv, "v_proj": kv}
        self.qkv_proj = Linear(
            config.hidden_size, [*parts.values()], bias=fields.attention_bias, sources=[*parts]
        )
        self.o_proj = RowLinear(q, config.hidden_size, parallel, bias=fields.attention_bias)
        self.attention = Attention(
            heads=heads.length,
            kv_heads=kv_heads.length,
            head_dim=plan.head_dim,
            scale=1.0,
            window=plan.window,
            owner=owner,
            sees_ahead=plan.window is not None,  # only there do tokens of a picture see later ones of it
        )
        self.q_norm = RMSNorm(plan.head_dim, fields.rms_norm_eps)
        # Published files have the projections of keys and values in all layers.
        self.ignored = () if owner is None else ("k_proj", "v_proj", "k_norm")
        if owner is None:
            self.k_norm = RMSNorm(plan.head_dim, fields.rms_norm_eps)
            self.v_norm = PlainRMSNorm(plan.head_dim, fields.rms_norm_eps)

    def forward(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        q, *others = self.qkv_proj(x).split(self.qkv_proj.widths, dim=-1)
        norm = self.q_norm
        if not others:
            prep = HeadPrep(cos_sin, norm.weight, eps=norm.eps)
            return self.o_proj(self.attention.read(q, prep))
        prep = HeadPrep(cos_sin, norm.weight, self.k_norm.weight, norm.eps, self.v_norm.weight)
        return self.o_proj(self.attention(q, others[0], others[-1], prep))


class _Spread(nn.Module):
    """Modules that a checkpoint has beside others, and not in a scope of their own."""

    def pull(self, weights: Weights) -> None:
        for name, module in self.named_children():
            load(module, weights.sibling(name))


class TokenRows(_Spread):
    """The vectors of a step's tokens for the layers of this stage, made of their ids and embeddings.

    A stage holds the columns of its own layers. To the stream that it hands on it adds what the next one
    makes vectors of: the embeddings, and the digits of the ids, for sampled tokens are known in the first
    and the last stage alone.
    """

    def __init__(
        self, config: ModelConfig, fields: SharingFields, width: int, parallel: Parallel, together: int
    ) -> None:
        super().__init__()
        self.size, self.width = config.hidden_size, width
        known = fields.vocab_size_per_layer_input
        self.known = known if known < config.vocab_size else None
        held = parallel.share_layers(config.num_layers, together)
        columns = Span(config.num_layers * width, held.start * width, held.stop * width)
        as_first = replace(parallel, stage=0, stages=1)  # later stages embed, too
        self.embed_tokens_per_layer = Embedding(known, columns, as_first, scale=width**0.5)
        self.per_layer_model_projection = Linear(config.hidden_size, columns)
        # The projection is divided by the root of the hidden size, which the norm undoes but for this.
        self.per_layer_projection_norm = RMSNorm(width, fields.rms_norm_eps * config.hidden_size)

    def forward(self, ids: Tensor, embedded: Tensor) -> Sequence[Tensor]:
        """ids [T], embedded [T, hidden_size] -> [T, width] for each layer."""
        by_layer = self.per_layer_model_projection(embedded).view(len(ids), -1, self.width)
        norm = self.per_layer_projection_norm
        normed = ops.rotate(by_layer, None, norm.weight, norm.eps).flatten(1)
        if self.known is not None:
            ids = ids.masked_fill(ids >= self.known, 0)
        both = ops.scale(ops.add(normed, self.embed_tokens_per_layer(ids)), 2**-0.5)
        return both.split(self.width, dim=-1)

    def hand_on(self, stream: Tensor, embedded: Tensor, ids: Tensor) -> Tensor:
        """Join what the next stage takes."""
        digits = torch.stack([ids >> 16, (ids >> 8) & 255, ids & 255], dim=1)
        return torch.cat([stream, embedded, digits.to(stream.dtype)], dim=1)

    def take_over(self, joined: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take what the stage before joined apart: -> (the stream, the embeddings, the ids)."""
        width = joined.shape[1] - self.size - _DIGITS
        stream, embedded, digits = joined.split([width, self.size, _DIGITS], dim=1)
        high, middle, low = digits.long().unbind(1)
        return stream.contiguous(), embedded.contiguous(), (high * 256 + middle) * 256 + low


class RowGate(_Spread):
    """Adds tokens' vectors for a layer to the stream, times gates that read `x`."""

    def __init__(self, size: int, width: int, fields: SharingFields) -> None:
        super().__init__()
        self.kind = activation_kind(fields.hidden_activation)
        self.per_layer_input_gate = Linear(size, width)
        self.per_layer_projection = Linear(width, size)
        self.post_per_layer_input_norm = RMSNorm(size, fields.rms_norm_eps)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [T, size], rows [T, width] -> [T, size]."""
        gated = ops.gate(rows, self.per_layer_input_gate(x), self.kind)
        return self.post_per_layer_input_norm(self.per_layer_projection(gated))


class SharingLayer(nn.Module):
    """The parts of a layer that both families have; each computes with them and its own."""

    def __init__(
        self,
        config: ModelConfig,
        fields: SharingFields,
        plan: LayerPlan,
        parallel: Parallel,
        owner: Attention | None,
    ) -> None:
        super().__init__()
        size, eps, kind = config.hidden_size, fields.rms_norm_eps, fields.hidden_activation
        self.rope = plan.rope
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = SharingAttention(config, fields, plan, parallel, owner)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.pre_feedforward_layernorm = RMSNorm(size, eps)
        if plan.sparsity:
            self.mlp = SparseMLP(size, plan.inner, parallel, activation=kind, sparsity=plan.sparsity)
        else:
            self.mlp = GatedMLP(size, plan.inner, parallel, activation=kind, sources=GATE_AND_UP)
        self.post_feedforward_layernorm = RMSNorm(size, eps)
        width = fields.hidden_size_per_layer_input
        self.row_gate = RowGate(size, width, fields) if width else None


class SharingDecoder(nn.Module):
    """The trunk: token ids -> hidden states. A stage does its part of that."""

    def __init__(
        self,
        setup: ModelSetup,
        fields: SharingFields,
        plans: Sequence[LayerPlan],
        layer_class: type[SharingLayer],
        streams: int = 1,
    ) -> None:
        """`streams`: the vectors of `hidden_size` numbers that a token is between layers."""
        super().__init__()
        config, parallel, size = setup.config, setup.parallel, setup.config.hidden_size
        width, together = fields.hidden_size_per_layer_input, layers_together(plans)
        self.is_last = parallel.last
        self.pad_id = fields.pad_token_id or 0
        self.embed_tokens = TokenEmbedding(config.vocab_size, size, parallel, scale=size**0.5)
        self.rows = TokenRows(config, fields, width, parallel, together) if width else None
        self.stream_size = streams * size + (size + _DIGITS if width else 0)
        owners: dict[int | None, Attention] = {}

        def make(number: int) -> nn.Module:
            plan = plans[number]
            layer = layer_class(config, fields, plan, parallel, owners.get(plan.owner))
            owners[number] = layer.self_attn.attention
            return layer

        self.layers = Layers(len(plans), parallel, make, together)
        self.norm = if_held(parallel.last, RMSNorm(size, fields.rms_norm_eps))
        self.rotaries = nn.ModuleList(Rotary(rope) for rope in dict.fromkeys(plan.rope for plan in plans))

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        rotations = {rotary.rope: rotary(positions) for rotary in self.rotaries}
        embedded: Tensor = self.embed_tokens(ids) if stream is None else stream
        x = self.enter(embedded) if stream is None else stream
        if self.rows is not None and stream is not None:
            x, embedded, ids = self.rows.take_over(stream)
        media = context().media if stream is None else None
        if self.rows is not None and media is not None:
            ids = ids.index_fill(0, media.places, self.pad_id)
        rows = [None] * len(self.layers) if self.rows is None else self.rows(ids, embedded)
        for layer, own in zip(self.layers, rows, strict=True):
            x = layer(x, rotations, own)
        if self.is_last:
            return self.norm(self.leave(x))
        return x if self.rows is None else self.rows.hand_on(x, embedded, ids)

    def enter(self, embedded: Tensor) -> Tensor:
        """What the first layer takes, of embeddings [T, hidden_size]."""
        return embedded

    def leave(self, x: Tensor) -> Tensor:
        """What the last norm takes [T, hidden_size], of what the last layer gives."""
        return x


class SharingForCausalLM(HeadFirstForCausalLM):
    def __init__(self, setup: ModelSetup, trunk: SharingDecoder, fields: SharingFields) -> None:
        config, softcap = setup.config, fields.final_logit_softcapping
        if looks_ahead(config) or config.raw.get("use_bidirectional_attention") == "all":
            raise ConfigError(f"{config.architecture} is not served with attention in both directions")
        super().__init__(setup, trunk, trunk.embed_tokens, logit_softcap=softcap)
        self.stream_size = trunk.stream_size
