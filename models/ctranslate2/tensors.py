"""The variables of a Whisper of CTranslate2's format, under the names that transformers has for tensors."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint.files import Source, Stored
from models.ctranslate2.file import ModelFile, Variable, read_file
from models.weight_slices import Cut

_TOP = {
    "decoder/embeddings/weight": "decoder.embed_tokens.weight",
    "decoder/position_encodings/encodings": "decoder.embed_positions.weight",
    "encoder/position_encodings/encodings": "encoder.embed_positions.weight",
}
_LAYER = re.compile(
    r"(?P<stack>encoder|decoder)/layer_(?P<number>\d+)/(?P<part>.+)/(?P<kind>weight|bias|gamma|beta)"
)
_PARTS = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
    "ffn/layer_norm": ("final_layer_norm",),
}
"""The matrices that lie one below the other in each of a layer's variables."""
_NORMS = {"gamma": "weight", "beta": "bias"}
_SCALE = "_scale"


def open_ctranslate2(path: Path) -> Source:
    """The tensors of a model.bin as a checkpoint of transformers would have them."""
    file = read_file(path)
    tensors: dict[str, Stored] = {}
    for name, variable in file.variables.items():
        if variable.shape and not name.endswith(_SCALE) and not name.startswith("decoder/alignment"):
            tensors.update(_translated(file, name, variable))
    return Source(path.name, tensors)


def _translated(file: ModelFile, name: str, variable: Variable) -> dict[str, Stored]:
    layer = _LAYER.fullmatch(name)
    if layer is None or layer["part"] not in _PARTS:
        plain = _TOP.get(name) or name.replace("/", ".").replace("gamma", "weight").replace("beta", "bias")
        return {f"model.{plain}": _stored(file, name, variable, 0, 1)}
    kind, members = _NORMS.get(layer["kind"], layer["kind"]), _PARTS[layer["part"]]
    scope = f"model.{layer['stack']}.layers.{layer['number']}"
    return {
        f"{scope}.{member}.{kind}": _stored(file, name, variable, index, len(members))
        for index, member in enumerate(members)
        if not (kind == "bias" and member.endswith("k_proj"))  # Whisper has none, and zeros stand there
    }


def _stored(file: ModelFile, name: str, variable: Variable, index: int, count: int) -> Stored:
    """One of `count` matrices that a variable holds one below the other."""
    shape = (variable.shape[0] // count, *variable.shape[1:])
    kind = "float32" if variable.dtype.startswith("int") else variable.dtype
    return Stored(shape, kind, file.path.name, partial(_read, file, name, index, count))


def _read(file: ModelFile, name: str, index: int, count: int, cut: Cut | None) -> Tensor:
    variable = file.variables[name]
    whole = _rows(file, variable, index, count)
    if variable.dtype.startswith("int"):  # rows were multiplied by their scales and rounded
        scales = _rows(
            file, file.variables[name + _SCALE], index if file.variables[name + _SCALE].shape else 0, count
        )
        whole = whole.float() / scales.float().reshape(-1, *[1] * (whole.dim() - 1))
    return whole if cut is None else cut.of(whole)


def _rows(file: ModelFile, variable: Variable, index: int, count: int) -> Tensor:
    """Read the rows of one of `count` matrices."""
    shape = (variable.shape[0] // count, *variable.shape[1:]) if variable.shape else ()
    dtype: torch.dtype = getattr(torch, variable.dtype)
    length = torch.Size(shape).numel() * dtype.itemsize
    with file.path.open("rb") as opened:
        opened.seek(variable.offset + index * length)
        return torch.frombuffer(bytearray(opened.read(length)), dtype=dtype).reshape(shape)
