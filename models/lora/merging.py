"""An adapter that is merged into its base while weights are read: each matrix is the sum, and then cut,
converted and quantized as any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint.files import Source, Stored, read_safetensors
from models.lora.names import Places
from models.lora_config import (
    PREFIX,
    TENSORS_FILE,
    AdapterConfig,
    AdapterError,
    is_of_head,
    read_adapter,
    split_name,
)
from models.weight_slices import Cut

Read = Callable[[Cut | None], Tensor]


def merged(source: Source, folder: Path, *, tied: bool | None, quantized: str = "") -> Source:
    """The tensors of a base with the adapter in `folder` merged into them.

    `tied`: whether the LM head is the matrix of the embeddings; None: if there is none of its own.
    `quantized`: how the base is quantized, if it is.
    """
    if quantized:
        raise AdapterError(
            f"{folder}: its base is quantized ({quantized}), and a sum cannot be told in its codes: name the "
            "base in full precision in adapter_config.json and add --quantization, or serve the base with "
            "--enable-lora --lora-modules"
        )
    merging = _Merging(source, folder, read_adapter(folder))
    if (
        any(kind == "embedding_A" for _, kind in map(split_name, merging.config.tensors))
        and tied is not False
    ):
        raise AdapterError(
            f"{folder}: it changes the embeddings, and not the head that shares their matrix, so they cannot "
            "be merged: serve the base with --enable-lora --lora-modules"
        )
    return Source(source.place, merging.tensors())


class _Merging:
    def __init__(self, source: Source, folder: Path, config: AdapterConfig) -> None:
        self.config = config
        self._folder = folder
        self._base = dict(source.tensors)
        stored = read_safetensors(folder / TENSORS_FILE)
        self._own = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}
        scopes = {name.rpartition(".")[0] for name in self._base}
        self._places = Places(scopes)

    def tensors(self) -> dict[str, Stored]:
        """All tensors of the sum."""
        result, missing = dict(self._base), set[str]()
        modules: dict[str, dict[str, Stored]] = {}
        for name, stored in self._own.items():
            module, kind = split_name(name)
            if is_of_head(name):
                result[self._in_base(name)] = stored
            else:
                modules.setdefault(module, {})[kind] = stored
        for module, parts in modules.items():
            scope = self._places.find(module)
            if scope is None or f"{scope}.weight" not in self._base:
                missing.add(module)
                continue
            result.update(self._sums(module, scope, parts))
        if missing:
            raise self._places.refuse(self._folder, missing)
        return result

    def _in_base(self, name: str) -> str:
        """The name of a tensor of the head: its own, or that of the base's tensor that it replaces."""
        scope = self._places.find(name.rpartition(".")[0])
        replaced = f"{scope}.{name.rpartition('.')[2]}"
        return replaced if replaced in self._base else name

    def _sums(self, module: str, scope: str, parts: dict[str, Stored]) -> dict[str, Stored]:
        """The tensors of a module to which the adapter adds, or that it replaces."""
        sums: dict[str, Stored] = {}
        if "base_weight" in parts:
            check_same(self._folder, module, parts["base_weight"], self._base[f"{scope}.weight"])
        weight = self._base[f"{scope}.weight"]
        if "A" in parts or "embedding_A" in parts:
            sums[f"{scope}.weight"] = replace(weight, read=self._summed(module, weight, parts))
        bias = parts.get("base_bias") or parts.get("bias") or self._base.get(f"{scope}.bias")
        if "B_bias" in parts and bias is not None:
            scale, old, more = self.config.scale(module, parts["A"].shape[0]), bias, parts["B_bias"]
            bias = replace(old, read=lambda cut: old.read(cut).float() + scale * more.read(cut).float())
        if bias is not None and f"{scope}.bias" in self._base:
            sums[f"{scope}.bias"] = bias
        elif bias is not None or "B_bias" in parts:
            raise AdapterError(
                f"{self._folder}: {module} of the base has no bias to which the adapter's can be added: "
                "serve the base with --enable-lora --lora-modules"
            )
        return sums

    def _summed(self, module: str, weight: Stored, parts: dict[str, Stored]) -> Read:
        embeds = "embedding_A" in parts
        a, b = (parts.get(f"embedding_{kind}" if embeds else kind) for kind in "AB")
        if a is None or b is None:
            raise AdapterError(f"{self._folder}: {module} has only one of the matrices A and B")
        scale, magnitude = self.config.scale(module, a.shape[0]), parts.get("magnitude")
        turned = embeds or (self.config.fan_in_fan_out and len(weight.shape) == 2)
        shape = (b.shape[0], a.shape[1])
        wanted = shape[::-1] if turned else shape
        if a.shape[0] != b.shape[1]:
            raise two_ranks(self._folder, module, a.shape, b.shape)
        if weight.shape != wanted:
            raise AdapterError(
                f"{self._folder}: {module} is {list(wanted)} in the adapter, and {list(weight.shape)} in the "
                "base: serve the base on which it was trained"
            )

        def read(cut: Cut | None) -> Tensor:
            with torch.inference_mode():
                whole = None if magnitude else cut
                base, delta = weight.read(whole).float(), b.read(None).float() @ a.read(None).float()
                delta = delta.t() if turned else delta  # [vocabulary, size], or as Conv1D stores it
                if not delta.isfinite().all():
                    raise not_finite(self._folder, module)
                total = base + scale * (delta if whole is None else whole.of(delta))
                if magnitude is not None:
                    lengths = magnitude.read(None).float() / total.norm(dim=0 if turned else 1)
                    total = total * (lengths if turned else lengths.unsqueeze(1))
                return total if whole is cut or cut is None else cut.of(total)

        return read


def check_same(folder: Path, module: str, saved: Stored, base: Stored) -> None:
    """Refuse an adapter that brings other weights of a layer than those that the base has."""
    if saved.shape == base.shape:
        ours = base.read(None)
        if torch.equal(saved.read(None).to(ours.dtype), ours):
            return
    raise other_weights(folder, module, saved.shape, base.shape)


def other_weights(folder: Path, module: str, saved: Sequence[int], base: Sequence[int]) -> AdapterError:
    """The error of an adapter that brings other weights of a layer than those that the base has."""
    return AdapterError(
        f"{folder}: it brings a full {module} {list(saved)} that is not the base's {list(base)}: "
        "merge it into its base (PEFT's merge_and_unload) and serve the result"
    )


def two_ranks(folder: Path, module: str, a: Sequence[int], b: Sequence[int]) -> AdapterError:
    """The error of matrices A [rank, inputs] and B [outputs, rank] that cannot be multiplied."""
    return AdapterError(
        f"{folder}: {module} has matrices of two ranks, A {list(a)} and B {list(b)}: save the adapter again"
    )


def not_finite(folder: Path, module: str) -> AdapterError:
    """The error of numbers that would make all answers NaN."""
    return AdapterError(f"{folder}: {module} has NaN or infinite numbers: train the adapter or save it again")
