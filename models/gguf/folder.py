"""Makes a folder in which the model of a GGUF file looks like any other checkpoint, and keeps it.

config.json and the files of the tokenizer are made of the metadata, and the weights are a link to the file,
so nothing else needs to know where they come from. Files of these names beside the GGUF file win.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from models.gguf.config import raw_config
from models.gguf.fields import shortest
from models.gguf.file import GgufFile, part_paths, read_gguf
from models.gguf.tokenizer import tokenizer_config, tokenizer_json
from models.gguf.vocabulary import read_vocabulary
from models.made_folder import link, made_once, write_json
from models.plain_files import FileError, check_regular, read_json

_log = logging.getLogger(__name__)

NO_TOKENIZER = "no_tokenizer.txt"
"""A file with the reason why there is no tokenizer.json."""

_MARK = "made_of_gguf.txt"
"""A file that says that a folder was made here, and of which file."""
_TOKENIZER = ("tokenizer*.json", "special_tokens_map.json", "chat_template.*", "additional_chat_templates")
_OTHERS = ("generation_config.json", "modules.json", "*sentence_*.json", "[0-9]_*")
"""Files beside the GGUF file that are used: those of a tokenizer if tokenizer.json is there, and others."""
_POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}
"""sentence-transformers' names of ways to pool, by the number in `pooling_type`."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def make_folder(path: Path, cache: Path, config_from: Path | None = None) -> Path:
    """Make the folder for a GGUF file within `cache`, or find the one made before.

    The config.json of the folder `config_from` wins over all others. Raises FileError.
    """
    parts = part_paths(path)
    config = _config_beside(path.parent) if config_from is None else config_from / "config.json"
    if config is not None:
        check_regular(config)
    files = [*parts, *_beside(path.parent), *([config] if config else [])]
    return made_once(cache, files, Path(__file__).parent, lambda made: _fill(made, read_gguf(path), config))


def gguf_parts(folder: Path) -> list[Path]:
    """The GGUF file, in its parts if it was split, of a folder that `make_folder` has made; else none."""
    return sorted(folder.glob("*.gguf")) if (folder / _MARK).is_file() else []


def _config_beside(folder: Path) -> Path | None:
    """The config.json beside the file, unless it is one of those that say nothing but a model type."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = read_json(path)
    return path if isinstance(config, dict) and config.get("architectures") else None


def _beside(folder: Path) -> Iterator[Path]:
    patterns = (*_TOKENIZER, *_OTHERS) if (folder / "tokenizer.json").is_file() else _OTHERS
    for pattern in patterns:
        yield from sorted(folder.glob(pattern))


def _fill(folder: Path, file: GgufFile, config: Path | None) -> None:
    link(folder, [*file.parts, *_beside(file.path.parent)])
    (folder / _MARK).write_text(os.path.abspath(file.path))
    write_json(folder / "config.json", _config(file, config))
    if not (folder / "tokenizer.json").exists():
        try:
            write_json(folder / "tokenizer.json", tokenizer_json(file))
            write_json(folder / "tokenizer_config.json", tokenizer_config(file))
        except FileError as error:  # that is no fault if --tokenizer names another one
            (folder / NO_TOKENIZER).write_text(str(error))
    if not (folder / "generation_config.json").exists():
        write_json(folder / "generation_config.json", _generation_config(file))
    if not (folder / "modules.json").exists():
        _write_modules(folder, file)


def _config(file: GgufFile, beside: Path | None) -> Mapping[str, object]:
    """The config of the metadata, or another one with what only the file knows: how weights are stored."""
    made = raw_config(file)
    if beside is None:
        return made
    other = read_json(beside)
    if not isinstance(other, dict):
        raise FileError(f"{beside} must hold a JSON object")
    _log.info("%s is used in place of what %s says", beside, file.path.name)
    return {**other, "quantization_config": made["quantization_config"]}


def _generation_config(file: GgufFile) -> Mapping[str, object]:
    """What ends an answer, and the sampling that the model's authors recommend."""
    found: dict[str, object] = {}
    for name, ours in _SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{name}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[ours] = shortest(value)
    with suppress(FileError):
        if ends := read_vocabulary(file).ends():
            found["eos_token_id"] = ends
    return found


def _write_modules(folder: Path, file: GgufFile) -> None:
    """Say as sentence-transformers does how tokens' vectors become one; llama.cpp brings that to length 1."""
    number = file.metadata.get(f"{file.metadata.get('general.architecture')}.pooling_type")
    if not isinstance(number, int) or number not in _POOLING:
        return
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for idx, (path, kind) in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    (folder / "1_Pooling").mkdir()
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": _POOLING[number]})
