"""GGUF files of tiny models, written as llama.cpp's converter does, beside the plain checkpoints they mean.

Names of tensors are those of the package `gguf`, by which the converter goes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from drive import Driver, load_ranks, run_in_chunks
from gguf_blocks import KINDS, Array, in_blocks
from gguf_experts import take_stacks
from gguf_hybrids import as_in_file, from_file, stored_name, take_pieces
from gguf_latent import take_halves
from gguf_metadata import FAMILIES, Family, model_fields, tokenizer_fields
from gguf_writer import Blob, write_gguf
from safetensors.torch import load_file, save_file
from tiny import hf_logits, tiny_checkpoint
from torch import Tensor

from models.gguf.folder import make_folder

_PLAIN = {"F32": (0, torch.float32), "F16": (1, torch.float16), "BF16": (30, torch.bfloat16)}


_HYBRID: dict[str, object] = {"layer_types": None, "num_hidden_layers": 4, "linear_num_key_heads": 2}
_SAID: dict[str, dict[str, object]] = {
    "Qwen2ForCausalLM": {"use_sliding_window": False},
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 16},
    "Gemma3ForCausalLM": {"query_pre_attn_scalar": 16},
    "Qwen2MoeForCausalLM": {"use_sliding_window": False, "mlp_only_layers": []},
    "Qwen3MoeForCausalLM": {"decoder_sparse_step": 1},
    "MptForCausalLM": {"attn_config": {"clip_qkv": 1.0}},
    "Qwen3_5ForCausalLM": _HYBRID,
    "Qwen3_5MoeForCausalLM": _HYBRID,
    "Qwen3NextForCausalLM": _HYBRID,
    "Lfm2MoeForCausalLM": {"tie_word_embeddings": True},
    "NemotronHForCausalLM": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"]
    },
}
"""Fields of the plain checkpoints whose tiny values no metadata could say."""


@dataclass(frozen=True)
class Pair:
    file: Path
    """The GGUF file."""
    plain: Path
    """The folder of the checkpoint that it means."""


@dataclass(frozen=True)
class Recipe:
    kind: str
    """The coding of matrices."""
    others: Mapping[str, str] = field(default_factory=dict)
    """The codings of matrices whose names in the file contain a word."""
    parts: int = 1
    """The files that it is split into."""
    fused: bool = False
    """Whether gates and ups of experts are put into one tensor."""
    joined: bool = False
    """Whether matrices that are now taken apart are written whole, as they were before."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """More of the metadata."""
    blobs: Sequence[Blob] = ()
    """More of tensors."""

    def kind_of(self, name: str, shape: Sequence[int]) -> str:
        plain = name.startswith(("position_embd", "token_types", "altup")) or any(
            word in name
            for word in ("ffn_gate_inp", "conv1d", "shortconv.conv", "ssm_norm", ".altup", ".laurel")
        )
        if len(shape) < 2 or plain or not name.endswith(".weight"):
            return "F32"
        return next((kind for word, kind in self.others.items() if word in name), self.kind)

    def __str__(self) -> str:
        return "-".join([self.kind, *(f"{word}_{kind}" for word, kind in self.others.items())])


def interleaved(matrix: Tensor, heads: int) -> list[int]:
    """List for each row which one it is in the model's own checkpoint: the halves of heads take turns."""
    size = len(matrix) // heads
    rows: list[int] = []
    for head in range(heads):
        for pair in range(size // 2):
            rows += [head * size + pair, head * size + size // 2 + pair]
    return rows


def write_pair(folder: Path, arch: str, recipe: Recipe, **shape: object) -> Pair:
    """Write a tiny model of `arch` as a GGUF file, and its plain checkpoint as what that means."""
    tiny_checkpoint(arch, folder / "plain", **{**_SAID.get(arch, {}), **shape})
    return convert(folder, recipe)


def convert(folder: Path, recipe: Recipe) -> Pair:
    """Write the checkpoint in the folder `plain` as a GGUF file, and rewrite it into what that means."""
    plain = folder / "plain"
    config = json.loads((plain / "config.json").read_text())
    tensors = load_file(plain / "model.safetensors")
    family = FAMILIES[config["architectures"][0]]
    fields = model_fields(plain, joined=recipe.joined)
    layers = next(value for name, value in fields.items() if name.endswith(".block_count"))
    names = gguf.get_tensor_name_map(family.arch, layers)
    blobs = list(recipe.blobs)
    others, stacks = take_pieces(tensors, config, joined=recipe.joined)
    left = {name: tensor for name, tensor in tensors.items() if name not in others}
    experts, of_experts = take_stacks(left, recipe.fused)
    others, stacks = others | experts, stacks + of_experts
    if not recipe.joined:
        split, halves = take_halves(tensors, config)
        others, stacks = others | split, stacks + halves
    for stack in stacks:
        number, data, meant = _encoded(stack.tensor, recipe.kind_of(stack.name, stack.tensor.shape))
        blobs.append(Blob(stack.name, tuple(stack.tensor.shape), number, data))
        stack.write(meant)
    for name, tensor in tensors.items():
        known = name.removeprefix("bert.").removeprefix("nomic_bert.").removeprefix("roberta.")
        known = known.removeprefix("transformer.") if family.arch == gguf.MODEL_ARCH.BLOOM else known
        if known.startswith(family.left_out) or name in others:
            continue
        stored = stored_name(known) or names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        first = family.first_position if "position_embeddings" in name else 0
        changed = as_in_file(name, tensor[first:].float(), config)
        blob, read = _converted(name, stored, changed, family, recipe, config)
        blobs.append(blob)
        tensors[name] = torch.cat([tensor[:first], from_file(name, read, config)])
    save_file({name: t.contiguous() for name, t in tensors.items()}, plain / "model.safetensors")
    return Pair(_write(folder, blobs, recipe), plain)


def _converted(
    name: str, stored: str, tensor: Tensor, family: Family, recipe: Recipe, config: Mapping[str, int]
) -> tuple[Blob, Tensor]:
    """A tensor as the file has it, and what that means."""
    turned, shifted = (
        name.endswith(family.transposed or ("-",)),
        family.shifted and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"),
    )
    tensor = tensor.t() if turned else tensor + 1 if shifted else tensor
    rows: list[int] | None = None
    if family.interleaved and ("q_proj" in name or "k_proj" in name):
        heads = config["num_key_value_heads" if "k_proj" in name else "num_attention_heads"]
        rows = interleaved(tensor, heads)
        tensor = tensor[rows]
    kind = recipe.kind_of(stored, tensor.shape)
    number, data, meant = _encoded(tensor, kind)
    blob = Blob(stored, tuple(tensor.shape), number, data)
    if rows is not None:
        back = torch.empty_like(meant)
        back[rows] = meant
        meant = back
    return blob, meant.t() if turned else meant - 1 if shifted else meant


def _encoded(tensor: Tensor, kind: str) -> tuple[int, bytes, Tensor]:
    if kind in _PLAIN:
        number, dtype = _PLAIN[kind]
        values = tensor.to(dtype).contiguous()
        return number, values.view(torch.uint8).numpy().tobytes(), values.float()
    array: Array = tensor.contiguous().numpy()
    data, meant = in_blocks(array, kind)
    return KINDS[kind], data, torch.from_numpy(np.ascontiguousarray(meant))


def _write(folder: Path, blobs: list[Blob], recipe: Recipe) -> Path:
    plain, parts = folder / "plain", recipe.parts
    fields = {**model_fields(plain, joined=recipe.joined), **tokenizer_fields(plain), **recipe.fields}
    if parts == 1:
        return write_gguf(folder / "model.gguf", fields, blobs)
    files: list[Path] = []
    for part in range(parts):
        split = {"split.no": part, "split.count": parts, "split.tensors.count": len(blobs)}
        path = folder / f"model-{part + 1:05}-of-{parts:05}.gguf"
        files.append(write_gguf(path, {**(fields if part == 0 else {}), **split}, blobs[part::parts]))
    return files[0]


def load_pair(
    pair: Pair, size: int = 1, load_format: str = "auto", overrides: Mapping[str, object] | None = None
) -> list[Any]:
    """Load the file as so many ranks, with what it says; `overrides` are other fields of the config."""
    folder = make_folder(pair.file, pair.file.parent)
    return load_ranks(folder, size, load_format=load_format, overrides=overrides)


PROMPT = random.Random(2).choices(range(5, 300), k=23)


def assert_same_logits(pair: Pair, *ranks: int, dtype: torch.dtype = torch.float32) -> None:
    """The file, as so many ranks, has the logits that transformers computes from what it means.

    In float64 they are exact; then ours may be off by twice as much as transformers' own in float32, which
    depends on the processor.
    """
    expected = hf_logits(pair.plain, PROMPT, dtype).log_softmax(-1)
    theirs = float((hf_logits(pair.plain, PROMPT).log_softmax(-1) - expected).abs().max())
    for size in ranks:
        logits = run_in_chunks(Driver(load_pair(pair, size)), 0, PROMPT, 7)
        torch.testing.assert_close(logits.log_softmax(-1), expected, atol=1e-4 + 2 * theirs, rtol=1e-5)


def assert_dummy_weights_are_alike(pair: Pair) -> None:
    """Dummy weights have the shapes and types of those of the file."""
    real, dummy = (load_pair(pair, load_format=load_format)[0] for load_format in ("auto", "dummy"))
    sizes = ({name: (x.shape, x.dtype) for name, x in model.named_parameters()} for model in (real, dummy))
    assert next(sizes) == next(sizes)
