"""Gemma 4: pictures of any shape, for a tower whose heads rows and columns turn, or for no tower at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load, load_children
from models.config import Eps, Size
from models.context import use_context
from models.layers.attention import EncoderAttention
from models.layers.linear import Linear, RowOrder, frozen
from models.layers.mlp import activation_kind
from models.layers.norm import LayerNorm, PlainRMSNorm, RMSNorm
from models.ops.attention_inputs import HeadPrep
from models.towers.blocks import Learned, PixelPatches, segments
from models.towers.tower import InLayers, TowerInput, TowerSetup, read_tower_fields

_OTHERS = ("model.audio_tower", "model.embed_audio")
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class _Rope(msgspec.Struct, frozen=True):
    rope_theta: Annotated[float, msgspec.Meta(gt=0)] = 100.0
    rope_type: Literal["axial", "default"] = "axial"


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a vision_config."""

    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_hidden_layers: Size = 16
    num_attention_heads: Size = 12
    num_key_value_heads: Size = 12
    head_dim: Size = 64
    hidden_activation: str = "gelu_pytorch_tanh"
    rms_norm_eps: Eps = 1e-6
    rope_parameters: _Rope = _Rope()
    pooling_kernel_size: Size = 3
    patch_size: Size = 16
    position_embedding_size: Size = 10_240
    use_clipped_linears: bool = False
    """Whether what goes into matrices of layers, and comes out, is cut down to stored bounds."""
    standardize: bool = False
    """Whether tokens are moved and scaled by stored vectors."""


class _AxisOrder:
    """The order of rows in which heads turn as `ops.rotate` does it: their first half with the second. The
    checkpoint turns each half by itself, one by the column and one by the row."""

    def __init__(self, dim: int) -> None:
        self._dim = dim

    def order(self, rows: int) -> Tensor:
        quarters = torch.arange(rows).view(-1, 2, 2, self._dim // 4)  # [heads, axis, part, pair]
        return quarters.transpose(1, 2).flatten()


class _Clipped(nn.Module):
    """A matrix, and bounds to which what goes in and what comes out is cut down, if the tower has some."""

    bounds: list[Tensor]

    def __init__(self, inputs: int, outputs: int, clips: bool, order: RowOrder | None = None) -> None:
        super().__init__()
        self.linear = Linear(inputs, outputs, sources=("linear",), orders=(order,))
        self.clips = clips

    def pull(self, weights: Weights) -> None:
        load(self.linear, weights / "linear")
        self.bounds = [weights.take(name, []) for name in _BOUNDS if self.clips]

    def forward(self, x: Tensor) -> Tensor:
        if not self.clips:
            return self.linear(x)
        least_in, most_in, least_out, most_out = self.bounds
        return self.linear(x.clamp(least_in, most_in)).clamp(least_out, most_out)


class _Attention(nn.Module):
    def __init__(self, fields: _Fields) -> None:
        super().__init__()
        size, dim, eps = fields.hidden_size, fields.head_dim, fields.rms_norm_eps
        clips = fields.use_clipped_linears
        heads, keys = fields.num_attention_heads * dim, fields.num_key_value_heads * dim
        self.order = _AxisOrder(dim)
        self.q_proj = _Clipped(size, heads, clips, self.order)
        self.k_proj = _Clipped(size, keys, clips, self.order)
        self.v_proj, self.o_proj = _Clipped(size, keys, clips), _Clipped(heads, size, clips)
        self.q_norm, self.k_norm, self.v_norm = RMSNorm(dim, eps), RMSNorm(dim, eps), PlainRMSNorm(dim, eps)
        self.attention = EncoderAttention(head_dim=dim, scale=1.0)

    def pull(self, weights: Weights) -> None:
        load_children(self, weights)
        for norm in (self.q_norm, self.k_norm):
            norm.weight = frozen(norm.weight[self.order.order(norm.size).to(norm.weight.device)])

    def forward(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        v = self.v_proj(x).unflatten(1, (-1, self.v_norm.size))
        prep = HeadPrep(cos_sin, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        return self.o_proj(self.attention(self.q_proj(x), self.k_proj(x), self.v_norm(v).flatten(1), prep))


class _MLP(nn.Module):
    def __init__(self, fields: _Fields) -> None:
        super().__init__()
        size, inner, clips = fields.hidden_size, fields.intermediate_size, fields.use_clipped_linears
        self.gate_proj, self.up_proj = _Clipped(size, inner, clips), _Clipped(size, inner, clips)
        self.down_proj = _Clipped(inner, size, clips)
        self.kind = activation_kind(fields.hidden_activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.activation(self.gate_proj(x), self.kind) * self.up_proj(x))


class _Layer(nn.Module):
    pauses: ClassVar[bool] = True

    def __init__(self, fields: _Fields) -> None:
        super().__init__()
        size, eps = fields.hidden_size, fields.rms_norm_eps
        self.input_layernorm, self.self_attn = RMSNorm(size, eps), _Attention(fields)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.pre_feedforward_layernorm, self.mlp = RMSNorm(size, eps), _MLP(fields)
        self.post_feedforward_layernorm = RMSNorm(size, eps)

    def forward(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cos_sin))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma4Tower(nn.Module):
    levels = 0

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__()
        self.fields = fields = read_tower_fields(setup.config["vision_config"], _Fields)
        text: Mapping[str, Any] = setup.config["text_config"]
        self.sees_media = text.get("use_bidirectional_attention") == "vision"
        size, side = fields.hidden_size, fields.patch_size
        self.patches = PixelPatches(size, side, setup.pictures, bias=False)
        self.places = Learned(2, fields.position_embedding_size, size, name="position_embedding_table")
        self.layers = nn.ModuleList(_Layer(fields) for _ in range(fields.num_hidden_layers))
        self.standard = nn.ModuleList(
            Learned(size, name=name) for name in ("std_bias", "std_scale") if fields.standardize
        )
        self.norm = PlainRMSNorm(size, fields.rms_norm_eps)
        self.projection = Linear(size, setup.hidden_size)
        pairs = torch.arange(0, fields.head_dim // 2, 2, dtype=torch.float32) / (fields.head_dim // 2)
        self.frequencies = (1.0 / fields.rope_parameters.rope_theta**pairs).repeat(2)
        self.axes = torch.arange(2).repeat_interleave(len(pairs))

    def pull(self, weights: Weights) -> None:
        weights.ignore(*_OTHERS)
        tower, projector = weights / "model.vision_tower", weights / "model.embed_vision"
        load(self.patches, tower / "patch_embedder.input_proj")
        load(self.places, tower / "patch_embedder")
        load(self.layers, tower / "encoder.layers")
        for vector in self.standard:
            load(vector, tower)
        load(self.norm, projector)
        load(self.projection, projector / "embedding_projection")

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        x = self.patches(items)
        places = torch.cat([places_in(*item.grid[1:]) for item in items], dim=1).to(x.device)  # [2, T]
        x = x + self.places.weight[0][places[0]] + self.places.weight[1][places[1]]
        cos_sin = ops.angles(places, self.frequencies.to(x.device), 1.0, self.axes.to(x.device))
        counts = [prod(item.grid) for item in items]
        step = segments(counts, x.device)
        for layer in self.layers:
            with use_context(step):
                x = layer(x, cos_sin)
            yield
        means = [self._mean(rows, item) for rows, item in zip(x.split(counts), items, strict=True)]
        wide = torch.cat(means).float() * self.fields.hidden_size**0.5
        if self.standard:
            bias, factor = self.standard
            wide = (wide - bias.weight.float()) * factor.weight.float()
        rows = self.projection(self.norm(wide.to(x.dtype)))
        return list(rows.split([item.embeddings for item in items]))

    def _mean(self, rows: Tensor, item: TowerInput) -> Tensor:
        """The means of squares of patches [embeddings, size]."""
        side, (_, down, across) = self.fields.pooling_kernel_size, item.grid
        squares = rows.view(down // side, side, across // side, side, -1)
        return squares.mean((1, 3)).flatten(0, 1)


def places_in(down: int, across: int) -> Tensor:
    """The column and the row of each patch of a picture [2, P]."""
    return torch.stack([torch.arange(across).repeat(down), torch.arange(down).repeat_interleave(across)])


_EPS = 1e-5


class _UnifiedFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a vision_config."""

    patch_size: Size = 16
    pooling_kernel_size: Size = 3
    mm_embed_dim: Size = 3840
    mm_posemb_size: Size = 1120
    rms_norm_eps: Eps = 1e-6


class _ChannelOrder:
    """The order of a square's numbers by channel; the checkpoint has the channels of each pixel together."""

    def order(self, rows: int) -> Tensor:
        return torch.arange(rows).view(-1, 3).t().flatten()


class Gemma4UnifiedTower(nn.Module):
    """Squares of pixels, between norms, are the text's embeddings but for one matrix."""

    levels = 0

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__()
        fields = read_tower_fields(setup.config["vision_config"], _UnifiedFields)
        text: Mapping[str, Any] = setup.config["text_config"]
        self.sees_media = text.get("use_bidirectional_attention") == "vision"
        size, self.merge = fields.mm_embed_dim, fields.pooling_kernel_size
        side = fields.patch_size * self.merge
        self.pixel_norm = LayerNorm(3 * side * side, _EPS, order=_ChannelOrder())
        self.patches = PixelPatches(size, side, setup.pictures, bias=True)
        self.patch_norm, self.place_norm = LayerNorm(size, _EPS), LayerNorm(size, _EPS)
        self.places = Learned(fields.mm_posemb_size, 2, size, name="pos_embedding")
        self.norm = PlainRMSNorm(size, fields.rms_norm_eps)
        self.projection = Linear(size, setup.hidden_size)

    def pull(self, weights: Weights) -> None:
        weights.ignore("model.embed_audio")
        own, projector = weights / "model.vision_embedder", weights / "model.embed_vision"
        load(self.pixel_norm, own / "patch_ln1")
        load(self.patches, own / "patch_dense")
        load(self.patch_norm, own / "patch_ln2")
        load(self.places, own)
        load(self.place_norm, own / "pos_norm")
        load(self.norm, projector)
        load(self.projection, projector / "embedding_projection")

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        yield  # there are no layers
        pixels = self.pixel_norm(self.patches.cut(items))
        rows = self.patch_norm(ops.linear(pixels, self.patches.weight, self.patches.bias))
        squares = [places_in(item.grid[1] // self.merge, item.grid[2] // self.merge) for item in items]
        column, row = torch.cat(squares, dim=1).to(rows.device)
        rows = self.place_norm(rows + (self.places.weight[column, 0] + self.places.weight[row, 1]))
        made = self.projection(self.norm(rows))
        return list(made.split([item.embeddings for item in items]))
