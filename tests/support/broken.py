"""Checkpoints that somebody has broken: how they are made, and the line with which each is refused."""

import json
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from live import PATIENCE
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.config import read_config
from models.conversion.conversion_choice import resolve_conversion
from models.loader import LoadOptions, load_model
from models.pooling.config import read_pooling
from worker.logs import error_text, one_line

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GATE = "model.layers.1.mlp.gate_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
EMBEDDINGS = "model.embed_tokens.weight"

Break = Callable[[Path], object]


class Case(NamedTuple):
    """A way to break a checkpoint, and texts that the line about it must have."""

    name: str
    breaks: Break
    told: tuple[str, ...]


def case(name: str, breaks: Break, *told: str) -> Case:
    return Case(name, breaks, told)


def refusal(folder: Path, load_format: str = "auto", dtype: torch.dtype = torch.float32) -> str:
    """Load a checkpoint as an engine does, and return the reason that it would end with."""
    try:
        config = read_config(folder, {})
        conversion = resolve_conversion(config, folder)
        pooling = read_pooling(folder, config, {})
        load_model(
            LoadOptions(
                config, folder, dtype=dtype, load_format=load_format, conversion=conversion, pooling=pooling
            )
        )
    except Exception as error:
        return f"error: {one_line(error)}"
    raise AssertionError(f"{folder} was loaded")


def assert_refused(broken: Case, folder: Path) -> None:
    """Break a checkpoint: loading it ends soon, with a reason in short lines that has all these texts."""
    broken.breaks(folder)
    started = time.monotonic()
    assert_told(refusal(folder), broken.told)
    assert time.monotonic() - started < 5 * PATIENCE


def assert_told(line: str, told: tuple[str, ...]) -> None:
    assert max(map(len, error_text(line.removeprefix("error: ")).splitlines())) <= 200
    assert [text for text in told if text not in line] == [], line


# Files


def put(content: bytes | str | None, name: str = WEIGHTS) -> Break:
    """Write a file with this content, in place of one that may be there; None removes it."""

    def breaks(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return breaks


def replaced(make: Callable[[Path], object], name: str = WEIGHTS) -> Break:
    """Have `make` put something else at the path of a file."""

    def breaks(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return breaks


def cut(keep: Callable[[int], int], name: str = WEIGHTS) -> Break:
    """Keep the beginning of a file, as an interrupted download would."""

    def breaks(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: keep(len(content))])

    return breaks


# Headers


def header(change: Callable[[dict[str, dict[str, object]]], object]) -> Break:
    """Change the header of the weights, and leave their bytes as they are."""

    def breaks(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        described = json.loads(content[8 : 8 + length])
        change(described)
        (folder / WEIGHTS).write_bytes(with_header(json.dumps(described).encode(), content[8 + length :]))

    return breaks


def with_header(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def described(tensor: str, **fields: object) -> Break:
    """Change what the header says of one tensor; None removes a field."""

    def change(tensors: dict[str, dict[str, object]]) -> None:
        changed = {**tensors[tensor], **fields}
        tensors[tensor] = {name: value for name, value in changed.items() if value is not None}

    return header(change)


# Tensors


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Break:
    """Write the weights again with other tensors."""

    def breaks(folder: Path) -> None:
        everything = load_file(folder / WEIGHTS)
        change(everything)
        save_file(everything, folder / WEIGHTS)

    return breaks


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Break:
    return tensors(lambda everything: everything.update({name: change(everything[name]).contiguous()}))


def with_number(name: str, number: float, dtype: torch.dtype = torch.float32) -> Break:
    """Put one number into the middle of a tensor."""

    def change(old: Tensor) -> Tensor:
        new = old.to(dtype)
        new.view(-1)[new.numel() // 2] = number
        return new

    return tensor(name, change)


def sharded(folder: Path, change: Callable[[dict[str, str]], object] = lambda places: None) -> None:
    """Divide the weights into two files with an index, which `change` may change."""
    everything = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    places = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(everything)}
    for file in set(places.values()):
        save_file({name: everything[name] for name in places if places[name] == file}, folder / file)
    change(places)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def index(change: Callable[[dict[str, str]], object]) -> Break:
    return lambda folder: sharded(folder, change)


# Configs


def config(**fields: object) -> Break:
    """Change fields of config.json; None removes one."""

    def breaks(folder: Path) -> None:
        given: Mapping[str, object] = json.loads((folder / "config.json").read_text())
        changed = {**given, **fields}
        written = {name: value for name, value in changed.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(written))

    return breaks
