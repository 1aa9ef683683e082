"""Reads LoRA adapters: each layer reads its own matrices of an adapter, cut as its weight is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.files import Stored, read_safetensors
from models.checkpoint.weights import Weights
from models.layers.embedding import Embedding, LMHead
from models.layers.linear import GatedLinear, Linear, Place, RowLinear, cut_of
from models.lora.names import Places, ends_cut_off
from models.lora_config import (
    MERGE,
    PREFIX,
    TENSORS_FILE,
    AdapterConfig,
    AdapterError,
    is_of_head,
    split_name,
)
from models.ops.grouped_matrix import widen
from models.ops.lora_ops import Adaptable, AdapterStore, Block, LayerAdapter
from models.parallel.rank_shares import Span
from models.quantization.matrices import read_embeddings, read_matrix

AdaptedLayer = Linear | Embedding | LMHead
"""A layer that may have adapters."""
Parts = Mapping[str, Stored]
"""The tensors of a module by their kinds."""


def open_adapters(layers: Sequence[AdaptedLayer], most: int, rank: int, in_step: int) -> AdapterStore:
    """Let the layers of a loaded model have adapters, as `ops.hold_adapters` says."""
    places = [layer.places for layer in layers]
    scopes = [len({place.scope for place in own}) for own in places]
    given = zip(layers, scopes, map(len, places), strict=True)
    hold = ops.hold_adapters if layers else ops.SPECIFIED["hold_adapters"]
    store: AdapterStore = hold(
        [
            Adaptable(
                *(layer.weight, layer.inputs.length, sum(layer.widths), own, pieces + 1),
                embeds=isinstance(layer, Embedding),
            )
            for layer, own, pieces in given
        ],
        *(most, rank, in_step),
    )
    for layer, held in zip(layers, store.layers, strict=True):
        layer.adapters = held
    return store


def adaptable_layers(
    modules: Iterable[nn.Module], tower: Iterable[nn.Module]
) -> Iterator[Linear | Embedding]:
    """The layers that may have adapters: those of a tower have none, nor those whose numbers others need.

    Embeddings come after all others.
    """
    beside, embeddings = set(tower), list[Embedding]()
    for module in modules:
        if module in beside or not isinstance(module, Linear | Embedding):
            continue
        if module.places and not module.plain:
            if isinstance(module, Linear):
                yield module
            else:
                embeddings.append(module)
    yield from embeddings


@dataclass
class AdapterPull:
    """The layers of an adapter, as the layers of a model take them from its files."""

    folder: Path
    config: AdapterConfig
    layers: Sequence[AdaptedLayer]
    base: Callable[[], Weights]
    """A function that opens the weights of the model."""
    biases: Mapping[AdaptedLayer, Tensor]
    """The biases of layers, in float32 and on the host."""
    elsewhere: Sequence[str] = ()
    """The scopes of layers that other stages hold, which see to what the adapter has for these."""

    def __post_init__(self) -> None:
        stored = read_safetensors(self.folder / TENSORS_FILE)
        modules: dict[str, dict[str, Stored]] = {}
        for name, tensor in stored.items():
            module, kind = split_name(name.removeprefix(PREFIX))
            if not is_of_head(name.removeprefix(PREFIX)):
                modules.setdefault(module, {})[kind.removeprefix("embedding_")] = tensor
        places = Places(place.scope for layer in self.layers for place in layer.places)
        self._modules: dict[str, tuple[str, Parts]] = {}
        missing, elsewhere = set[str](), Places(self.elsewhere)
        for module, parts in modules.items():
            scope = places.find(module)
            if scope is None and not any(map(elsewhere.find, ends_cut_off(module))):
                missing.add(module)
            elif scope is not None:
                self._modules[scope] = module, parts
        if missing:
            raise places.refuse(self.folder, missing)
        self._weights: Weights | None = None

    def pull(self) -> Iterator[tuple[int, LayerAdapter]]:
        """What the adapter changes of each layer that it changes, by the layers' places."""
        for at, layer in enumerate(self.layers):
            if self.changes(layer):
                yield at, self._finite(layer, self._of_layer(layer))

    def _finite(self, layer: AdaptedLayer, found: LayerAdapter) -> LayerAdapter:
        """Returns what the adapter changes of a layer. Refuses numbers that would make all answers NaN."""
        numbers = (found.a, *(block.b for block in found.blocks), found.factor, found.shift)
        if all(each is None or bool(each.isfinite().all()) for each in numbers):
            return found
        scopes = [place.scope for place in layer.places if place.scope in self._modules]
        raise not_finite(self.folder, ", ".join(self._modules[scope][0] for scope in scopes))

    def changes(self, layer: AdaptedLayer) -> bool:
        return any(place.scope in self._modules for place in layer.places)

    def _of_layer(self, layer: AdaptedLayer) -> LayerAdapter:
        first_of: dict[str, int] = {}
        matrices: list[Tensor] = []
        blocks: list[Block] = []
        factors: list[Tensor | None] = []
        shifts: list[Tensor | None] = []
        start, bias = 0, self.biases.get(layer)
        for place in layer.places:
            rows = place.rows.length
            module, parts = self._modules.get(place.scope, ("", {}))
            if "base_weight" in parts:
                self._check_same(layer, place, module, parts["base_weight"])
            if "A" in parts or "B" in parts:
                a, b, scale = self._factors(module, parts, layer.inputs, place.rows.size)
                if place.scope not in first_of:
                    first_of[place.scope] = sum(map(len, matrices))
                    cut = cut_of(1, layer.inputs)
                    matrices.append(a if cut is None else cut.of(a))
                blocks.append(Block(start, first_of[place.scope], place.of(b), scale))
                factors.append(self._factor(layer, place, parts, a, b, scale))
            else:
                factors.append(None)
            old = None if bias is None else bias[start : start + rows]
            shifts.append(self._shift(layer, place, module, parts, old))
            start += rows
        lengths = [place.rows.length for place in layer.places]
        lengths.append(sum(layer.widths) - start)  # rows that fill a head up
        factor, shift = _joined([*factors, None], lengths, 1), _joined([*shifts, None], lengths, 0)
        if isinstance(layer, GatedLinear) and layer.up_first:
            half = start // 2
            factor, shift = (each if each is None else each.roll(half) for each in (factor, shift))
            blocks = [piece for block in blocks for piece in _turned(block, half)]
        whole = matrices[0] if len(matrices) == 1 else torch.cat(matrices) if matrices else None
        return LayerAdapter(whole, blocks, factor, shift)

    def _factors(self, module: str, parts: Parts, inputs: Span, outputs: int) -> tuple[Tensor, Tensor, float]:
        """A [rank, in], B [outputs, rank] and the scale of their product."""
        a, b = parts.get("A"), parts.get("B")
        if a is None or b is None:
            raise AdapterError(f"{self.folder}: {module} has only one of the matrices A and B")
        rank = a.shape[0]
        if b.shape[-1] != rank:
            raise AdapterError(
                f"{self.folder}: {module} has matrices of two ranks, A {list(a.shape)} and B "
                f"{list(b.shape)}: save the adapter again"
            )
        if a.shape != (rank, inputs.size) or b.shape != (outputs, rank):
            raise AdapterError(
                f"{self.folder}: {module} is {[b.shape[0], a.shape[-1]]} in the adapter, and "
                f"{[outputs, inputs.size]} in the model: serve the base on which it was trained"
            )
        return a.read(None), b.read(None), self.config.scale(module, rank)

    def _matrix(self, layer: AdaptedLayer, place: Place) -> Tensor:
        """The whole matrix of the base that has this place."""
        if self._weights is None:
            self._weights = self.base()
        if isinstance(layer, Embedding):
            shape = (layer.inputs.size, place.rows.size)
            return widen(read_embeddings(self._weights.at(place.scope), shape)).t()
        scope = layer.source if isinstance(layer, LMHead) else place.scope
        shape = (place.rows.size, layer.inputs.size)
        return widen(read_matrix(self._weights.at(scope), shape, transposed=layer.transposed))

    def _check_same(self, layer: AdaptedLayer, place: Place, module: str, saved: Stored) -> None:
        """Refuse other weights of a layer than the base has, which PEFT saves with factors of a head."""
        ours, theirs = self._matrix(layer, place), saved.read(None)
        theirs = theirs.t() if isinstance(layer, Embedding) else theirs
        if ours.shape != theirs.shape or not torch.equal(ours.to(theirs.dtype), theirs):
            raise AdapterError(
                f"{self.folder}: it brings a full {module} {list(theirs.shape)} that is not the base's "
                f"{list(ours.shape)}: {MERGE}"
            )

    def _factor(
        self, layer: AdaptedLayer, place: Place, parts: Parts, a: Tensor, b: Tensor, scale: float
    ) -> Tensor | None:
        """What the sums of rows are multiplied with (DoRA): their magnitudes by the lengths of the rows."""
        if "magnitude" not in parts:
            return None
        lengths = (self._matrix(layer, place).float() + scale * b.float() @ a.float()).norm(dim=1)
        return place.of(parts["magnitude"].read(None).float().flatten() / lengths)

    def _shift(
        self, layer: AdaptedLayer, place: Place, module: str, parts: Parts, old: Tensor | None
    ) -> Tensor | None:
        """What is added to the sums of rows: the bias of B, and how much a new bias differs from theirs."""
        bias = parts.get("base_bias") or parts.get("bias")
        if bias is None and "B_bias" not in parts:
            return None
        shift = torch.zeros(place.rows.length)
        if bias is not None:
            if old is None:
                raise AdapterError(
                    f"{self.folder}: it brings a bias for {module}, which has none in the base"
                )
            shift = place.of(bias.read(None).float()) - old
        if "B_bias" in parts:
            more = self.config.scale(module, parts["A"].shape[0]) * parts["B_bias"].read(None).float()
            shift = shift + place.of(more)
        if isinstance(layer, RowLinear) and layer.parallel.rank > 0:
            return torch.zeros_like(shift)  # it must enter the sum of ranks once
        return shift


def not_finite(folder: Path, module: str) -> AdapterError:
    """The error of numbers that would make all answers NaN."""
    return AdapterError(f"{folder}: {module} has NaN or infinite numbers: train the adapter or save it again")


def _joined(parts: Sequence[Tensor | None], lengths: Sequence[int], rest: float) -> Tensor | None:
    """Numbers of parts of a layer's outputs as those of all, with `rest` where there are none; or None."""
    if not any(part is not None for part in parts):
        return None
    given = zip(parts, lengths, strict=True)
    return torch.cat([torch.full((length,), rest) if part is None else part for part, length in given])


def _turned(block: Block, half: int) -> Iterator[Block]:
    """The pieces of a block when the two halves of a layer's outputs change places."""
    for start, stop in ((0, half), (half, 2 * half)):
        first, last = max(start, block.start), min(stop, block.start + len(block.b))
        if first < last:
            b = block.b[first - block.start : last - block.start]
            yield Block((first + half) % (2 * half), block.first, b, block.scale)
