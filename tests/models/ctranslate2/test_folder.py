"""A Whisper in CTranslate2's format is the checkpoint of transformers that it was converted from."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import tiny_whisper
import torch
from torch import Tensor

from models.checkpoint.files import open_source
from models.ctranslate2.file import read_file
from models.ctranslate2.folder import is_ctranslate2, made_weights, make_folder
from models.ctranslate2.tensors import open_ctranslate2
from models.plain_files import FileError
from server.speech.vocabulary import read_tokens

TYPES = {torch.float32: 0, torch.int8: 1, torch.int16: 2, torch.float16: 4}
PARTS = {
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


def variables_of(tensors: dict[str, Tensor], *, rounded: bool) -> dict[str, Tensor]:
    """What a converter makes of a checkpoint: joined matrices, rounded to 8 bits if they shall be."""
    found: dict[str, Tensor] = {"decoder/activation": torch.tensor(3, dtype=torch.int8)}
    for stack in ("encoder", "decoder"):
        found[f"{stack}/num_heads"] = torch.tensor(4, dtype=torch.int16)
        own = {
            name.removeprefix(f"model.{stack}."): each
            for name, each in tensors.items()
            if f".{stack}." in name
        }
        for number in range(2):
            for part, members in PARTS.items():
                scope = f"layers.{number}."
                if scope + members[0] + ".weight" not in own:
                    continue
                norm = "norm" in part
                weight = torch.cat([own[f"{scope}{member}.weight"] for member in members])
                zeros = torch.zeros(len(weight) // len(members))
                bias = torch.cat([own.get(f"{scope}{member}.bias", zeros) for member in members])
                place = f"{stack}/layer_{number}/{part}"
                if rounded and not norm:
                    scale = 127 / weight.abs().amax(1)
                    found[f"{place}/weight_scale"] = scale
                    weight = (weight * scale[:, None]).round().to(torch.int8)
                found[f"{place}/{'gamma' if norm else 'weight'}"] = weight
                found[f"{place}/{'beta' if norm else 'bias'}"] = bias
        for kind, named in (("weight", "gamma"), ("bias", "beta")):
            found[f"{stack}/layer_norm/{named}"] = own[f"layer_norm.{kind}"]
        found[f"{stack}/position_encodings/encodings"] = own["embed_positions.weight"]
    for name in ("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"):
        found["encoder/" + name.replace(".", "/")] = tensors[f"model.encoder.{name}"]
    return found | {"decoder/embeddings/weight": tensors["model.decoder.embed_tokens.weight"]}


def write(path: Path, variables: dict[str, Tensor], kind: str = "WhisperSpec") -> None:
    with path.open("wb") as file:

        def text(said: str) -> None:
            file.write(struct.pack("<H", len(said) + 1) + said.encode() + b"\0")

        file.write(struct.pack("<I", 6))
        text(kind)
        file.write(struct.pack("<II", 3, len(variables)))
        for name, each in variables.items():
            text(name)
            file.write(struct.pack("<B", each.dim()) + struct.pack(f"<{each.dim()}I", *each.shape))
            content = each.contiguous().numpy().tobytes()
            file.write(struct.pack("<BI", TYPES[each.dtype], len(content)) + content)
        file.write(struct.pack("<I", 0))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    tiny_whisper.make(folder)
    return folder


def converted(original: Path, target: Path, *, rounded: bool = False) -> dict[str, Tensor]:
    """Write the folder that faster-whisper would publish, and give the tensors of the original."""
    tensors = {name: each.read(None) for name, each in open_source(original, "auto").tensors.items()}
    write(target / "model.bin", variables_of(tensors, rounded=rounded))
    shutil.copy(original / "tokenizer.json", target)
    generation = json.loads((original / "generation_config.json").read_text())
    settings: dict[str, Any] = {
        "suppress_ids": generation["suppress_tokens"],
        "suppress_ids_begin": generation["begin_suppress_tokens"],
    }
    (target / "config.json").write_text(json.dumps(settings))
    return tensors


@pytest.mark.parametrize("rounded", (False, True), ids=("as they are", "8 bits"))
def test_tensors_are_those_of_the_original(original: Path, tmp_path: Path, rounded: bool) -> None:
    tensors = converted(original, tmp_path, rounded=rounded)
    found = open_ctranslate2(tmp_path / "model.bin").tensors
    assert found.keys() == tensors.keys() - {"proj_out.weight"}
    for name, each in found.items():
        atol = float(tensors[name].abs().max()) / 200 if rounded else 0.0
        torch.testing.assert_close(each.read(None), tensors[name], rtol=0, atol=atol, msg=name)


def test_the_settings_are_those_of_the_original(original: Path, tmp_path: Path) -> None:
    converted(original, tmp_path)
    (cache := tmp_path / "cache").mkdir()
    assert is_ctranslate2(tmp_path) and not is_ctranslate2(original)
    made = make_folder(tmp_path, cache)
    assert made_weights(made) == [made / "model.bin"] and made_weights(original) == []
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (original, made))
    assert {name: before[name] for name in after if name in before and name != "dtype"} | {"dtype": 0} == {
        name: after[name] for name in after if name in before
    } | {"dtype": 0}
    expected, found = read_tokens(original), read_tokens(made)
    assert (
        found.suppressed == expected.suppressed
        and found.start == expected.start
        and found.end == expected.end
    )


def test_what_is_damaged_or_another_model_is_refused(original: Path, tmp_path: Path) -> None:
    converted(original, tmp_path)
    path = tmp_path / "model.bin"
    whole = path.read_bytes()
    for length in (3, 40, len(whole) // 2, len(whole) - 9000):
        path.write_bytes(whole[:length])
        with pytest.raises(FileError, match=r"cut off or damaged|not read"):
            read_file(path)
    write(path, {}, "TransformerSpec")
    with pytest.raises(FileError, match="of which only Whisper is read"):
        is_ctranslate2(tmp_path)
