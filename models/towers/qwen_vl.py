"""The towers of Qwen-VL: pictures of any shape, in which rows and columns of patches turn heads. Patches lie
square by square, each of which becomes one row for the text. A frame sees itself only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isqrt
from typing import ClassVar, Literal

import msgspec
import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import ConfigError, Size
from models.context import ForwardContext, use_context
from models.layers.linear import Linear
from models.layers.mlp import GATE_AND_UP, MLP, GatedMLP
from models.layers.norm import LayerNorm, Norm, RMSNorm, enter
from models.layers.rotary import Rope, Rotary, plain_rope
from models.towers.blocks import WHOLE, Learned, PatchEmbedding, TowerLayer, TowerNames, segments
from models.towers.grids import between_cells, square_by_square, window_by_window
from models.towers.tower import InLayers, TowerInput, TowerSetup, read_tower_fields

_NAMES = TowerNames(qkv=("attn.qkv",), out="attn.proj", norms=("norm1", "norm2"))
_MakeNorm = Callable[[int], Norm]


class VisionFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a vision_config that all of these towers have, with the defaults of transformers."""

    depth: Size = 32
    num_heads: Size = 16
    hidden_act: str
    patch_size: Size = 14
    spatial_merge_size: Size = 2
    """Patches of each side of a square."""
    temporal_patch_size: Size = 2
    in_channels: Literal[3] = 3


_read = partial(read_tower_fields, where="vision_config in config.json")


def _check_axes(setup: TowerSetup) -> None:
    """Refuse a text that rows and columns could not turn."""
    text = setup.config.get("text_config") or setup.config
    if "mrope_section" not in (text.get("rope_scaling") or text.get("rope_parameters") or {}):
        raise ConfigError(
            "config.json: the text's rope parameters lack 'mrope_section', which says how many pairs of "
            "dimensions turn with rows and columns of pictures"
        )


class Merger(nn.Module):
    """The rows of a square of patches become one row of the text: two linear layers behind a norm."""

    def __init__(self, norm: Norm, inputs: int, outputs: int, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.norm = norm
        self.inner = Linear(inputs, inputs, bias=True, activation="gelu")
        self.outer = Linear(inputs, outputs, bias=True)
        self.inputs, self.names = inputs, names

    def pull(self, weights: Weights) -> None:
        for part, name in zip((self.norm, self.inner, self.outer), self.names, strict=True):
            load(part, weights / name)

    def forward(self, delta: Tensor, stream: Tensor) -> Tensor:
        """The stream [P, size], and what is still to be added to it, -> [squares, outputs]."""
        return self.project(enter(self.norm, delta, stream)[0].view(-1, self.inputs))

    def project(self, normed: Tensor) -> Tensor:
        return self.outer(self.inner(normed))


class LateNormMerger(Merger):
    """A merger that normalises the numbers of a square together."""

    def forward(self, delta: Tensor, stream: Tensor) -> Tensor:
        return self.project(self.norm(ops.add(stream, delta).view(-1, self.inputs)))


class QwenTower(nn.Module):
    """The base of the family's towers. It is whole for Qwen2-VL."""

    three_axes: ClassVar[bool] = True
    pauses: ClassVar[bool] = True
    levels: int = 0
    taken_behind: tuple[int, ...] = ()
    """The layers behind which `deeper` mergers make rows for the text's first layers."""
    deeper: nn.ModuleList

    def __init__(
        self,
        setup: TowerSetup,
        fields: VisionFields,
        size: int,
        *,
        mlp: Callable[[], nn.Module],
        norm: _MakeNorm,
        patch_bias: bool = False,
        merger: tuple[str, str, str] = ("ln_q", "mlp.0", "mlp.2"),
    ) -> None:
        """`size` is the width of the tower, and `merger` has the names of the merger's parts."""
        super().__init__()
        _check_axes(setup)
        heads, merge = fields.num_heads, fields.spatial_merge_size
        if size % (4 * heads):
            raise ConfigError(
                f"vision_config in config.json: the width {size} is not divided by 'num_heads' {heads} into "
                "heads that rows and columns can turn, which have a multiple of 4 dimensions"
            )
        self.merge = merge
        depth, side = fields.temporal_patch_size, fields.patch_size
        self.patch_embed = PatchEmbedding(
            size, side, setup.pictures, bias=patch_bias, depth=depth, merge=merge
        )
        self.rotary = Rotary(_two_axes(size // heads))
        self.blocks = nn.ModuleList(
            TowerLayer(size, heads, mlp(), (norm(size), norm(size)), _NAMES) for _ in range(fields.depth)
        )
        self.merger = Merger(norm(size), size * merge**2, setup.hidden_size, merger)

    def pull(self, weights: Weights) -> None:
        visual = weights.first("model.visual", "visual")
        load(self.patch_embed, visual / "patch_embed.proj")
        load(self.rotary, visual)
        load(self.blocks, visual / "blocks")
        load(self.merger, visual / "merger")

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        rows = yield from self.rows(items, self.patch_embed(items), self.places(items))
        return list(rows.split([item.embeddings for item in items]))

    def places(self, items: Sequence[TowerInput]) -> Tensor:
        """The row and the column of each patch [2, P]."""
        return torch.cat([square_by_square(item.grid, self.merge) for item in items], dim=1)

    def rows(self, items: Sequence[TowerInput], hidden: Tensor, places: Tensor) -> InLayers[Tensor]:
        """The embedded patches [P, size] at `places` -> the rows of all squares."""
        cos_sin, delta = self.rotary(places.to(hidden.device)), None
        deeper: list[Tensor] = []
        step = frames_of(items, hidden.device)
        yield
        for number, layer in enumerate(self.blocks):
            with use_context(step):
                delta, hidden = layer(delta, hidden, cos_sin)
            if number in self.taken_behind:
                deeper.append(self.deeper[self.taken_behind.index(number)](delta, hidden))
            yield
        rows = self.merger(delta, hidden)
        return torch.cat([rows, *deeper], dim=1) if deeper else rows


class Qwen2Fields(VisionFields, frozen=True, kw_only=True):
    embed_dim: Size = 1280
    """The width: `hidden_size` is that of the text here."""
    mlp_ratio: float = 4
    hidden_act: str = "quick_gelu"


class Qwen2Tower(QwenTower):
    def __init__(self, setup: TowerSetup) -> None:
        fields = _read(setup.config["vision_config"], Qwen2Fields)
        size, kind = fields.embed_dim, fields.hidden_act
        inner, names = int(size * fields.mlp_ratio), ("fc1", "fc2")
        mlp = partial(MLP, size, inner, WHOLE, activation=kind, names=names, bias=True)
        super().__init__(setup, fields, size, mlp=mlp, norm=partial(LayerNorm, eps=1e-6))


class Qwen25Fields(VisionFields, frozen=True, kw_only=True):
    hidden_size: Size = 3584
    intermediate_size: Size = 3420
    hidden_act: str = "silu"
    window_size: Size = 112
    """The side of a window in pixels."""
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    """The layers without windows."""


class Qwen25Tower(QwenTower):
    """In most layers, patches see those of their window only, so windows lie one behind the other."""

    def __init__(self, setup: TowerSetup) -> None:
        fields = _read(setup.config["vision_config"], Qwen25Fields)
        size, inner, kind = fields.hidden_size, fields.intermediate_size, fields.hidden_act
        mlp = partial(GatedMLP, size, inner, WHOLE, activation=kind, bias=True, sources=GATE_AND_UP)
        super().__init__(setup, fields, size, mlp=mlp, norm=partial(RMSNorm, eps=1e-6))
        self.window = fields.window_size // self.merge // fields.patch_size
        self.without_window = fields.fullatt_block_indexes
        if not self.window:
            raise ConfigError("vision_config in config.json: 'window_size' is less than a square of patches")

    def rows(self, items: Sequence[TowerInput], hidden: Tensor, places: Tensor) -> InLayers[Tensor]:
        order, lengths = self.windows(items)
        turning = self.by_window(places.t(), order).t().contiguous()
        order = order.to(hidden.device)
        hidden, delta = self.by_window(hidden, order), None
        cos_sin, frames = self.rotary(turning.to(hidden.device)), frames_of(items, hidden.device)
        windows = segments(lengths, hidden.device)
        yield
        for number, layer in enumerate(self.blocks):
            with use_context(frames if number in self.without_window else windows):
                delta, hidden = layer(delta, hidden, cos_sin)
            yield
        return self.merger(delta, hidden)[order.argsort()]

    def windows(self, items: Sequence[TowerInput]) -> tuple[Tensor, list[int]]:
        """The numbers of all squares, window by window, and the number of patches in each window."""
        orders: list[Tensor] = []
        lengths: list[int] = []
        done = 0
        for item in items:
            frames, rows, columns = item.grid
            grid = frames, rows // self.merge, columns // self.merge
            order, sizes = window_by_window(grid, self.window)
            orders.append(order + done)
            lengths += [size * self.merge**2 for size in sizes]
            done += len(order)
        return torch.cat(orders), lengths

    def by_window(self, patches: Tensor, order: Tensor) -> Tensor:
        """Rows of patches [P, F] whose squares lie in the order of windows."""
        return patches.unflatten(0, (-1, self.merge**2))[order].flatten(0, 1)


class Qwen3Fields(VisionFields, frozen=True, kw_only=True):
    depth: Size = 27
    hidden_size: Size = 1152
    intermediate_size: Size = 4304
    hidden_act: str = "gelu_pytorch_tanh"
    patch_size: Size = 16
    num_position_embeddings: Size = 2304
    """The entries of a square table of learned positions."""
    deepstack_visual_indexes: tuple[int, ...] = ()
    """The layers behind which there is a merger of its own, for the text's first layers."""


class Qwen3Tower(QwenTower):
    """Qwen3-VL, Qwen3.5 and Qwen3.6: learned positions, and rows for several layers of the text."""

    def __init__(self, setup: TowerSetup) -> None:
        fields = _read(setup.config["vision_config"], Qwen3Fields)
        size, inner, kind = fields.hidden_size, fields.intermediate_size, fields.hidden_act
        names, of_merger = ("linear_fc1", "linear_fc2"), ("norm", "linear_fc1", "linear_fc2")
        mlp = partial(MLP, size, inner, WHOLE, activation=kind, names=names, bias=True)
        norm = partial(LayerNorm, eps=1e-6)
        super().__init__(setup, fields, size, mlp=mlp, norm=norm, patch_bias=True, merger=of_merger)
        self.side = isqrt(fields.num_position_embeddings)
        self.pos_embed = Learned(fields.num_position_embeddings, size, name="weight")
        self.taken_behind = fields.deepstack_visual_indexes
        self.levels = len(self.taken_behind)
        if not set(self.taken_behind) <= set(range(fields.depth)):
            raise ConfigError(
                f"vision_config in config.json: 'deepstack_visual_indexes' is {list(self.taken_behind)}, but "
                f"the tower has the layers 0 to {fields.depth - 1}"
            )
        merged = size * self.merge**2
        self.deeper = nn.ModuleList(
            LateNormMerger(norm(merged), merged, setup.hidden_size, of_merger) for _ in range(self.levels)
        )

    def pull(self, weights: Weights) -> None:
        super().pull(weights)
        visual = weights.first("model.visual", "visual")
        load(self.pos_embed, visual / "pos_embed")
        load(self.deeper, visual / "deepstack_merger_list")

    def rows(self, items: Sequence[TowerInput], hidden: Tensor, places: Tensor) -> InLayers[Tensor]:
        return super().rows(items, ops.add(hidden, self.learned(items)), places)

    def learned(self, items: Sequence[TowerInput]) -> Tensor:
        """The learned positions of all patches [P, size], each between four entries of the table."""
        found = [between_cells(item.grid, self.merge, self.side) for item in items]
        table = self.pos_embed.weight
        entries, shares = (torch.cat(each, dim=1).to(table.device) for each in zip(*found, strict=True))
        corners = [table[entry] * share.unsqueeze(1) for entry, share in zip(entries, shares, strict=True)]
        return (corners[0] + corners[1] + corners[2] + corners[3]).to(table.dtype)


def frames_of(items: Sequence[TowerInput], device: torch.device) -> ForwardContext:
    """The context in which the patches of a frame see each other, and no others."""
    lengths = [item.grid[1] * item.grid[2] for item in items for _ in range(item.grid[0])]
    return segments(lengths, device)


def _two_axes(dim: int) -> Rope:
    """The rope of a head whose first pairs turn with the row of a patch, and the others with its column."""
    half = plain_rope(10000.0, dim // 2).frequencies
    return Rope(half * 2, axes=(0,) * len(half) + (1,) * len(half))
