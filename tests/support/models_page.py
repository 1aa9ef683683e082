"""Writes docs/models.md: which architectures are served, by which code, and why others are refused.

`make docs` runs it. `tests/models/families/test_architectures.py` compares the page with what happens.
"""

import tempfile
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

import torch
import transformers
from architectures import RUNS, names, outcome
from transformers.utils import logging

from models.composites import COMPOSITES
from models.registry import ARCHITECTURES

_TEXTS = [
    (name, ARCHITECTURES[text]) for name, composite in COMPOSITES.items() for text in composite.texts.values()
]
"""Composite architectures with the classes that compute their texts, of which one may have several."""
OWN = ARCHITECTURES | dict(_TEXTS)
"""The classes of our own, with those that compute the texts of composites."""
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
VERSION_LINE = f"The second and third list were made with transformers {transformers.__version__}."

_INTRODUCTION = f"""\
# Models

Made by `make docs`, which tries a tiny checkpoint of every causal language model that transformers knows.
{VERSION_LINE}

Any decoder below can also embed and classify. A class of another distribution serves its architectures once
it is registered (see [CONTRIBUTING.md](../CONTRIBUTING.md)).
"""
_OWN = """\
## With code of our own

| In `models/families/` | Architectures |
|---|---|"""
_FALLBACK = """
## With transformers' code

transformers computes everything but attention, which is ours, over our KV cache. Such a model is not cut over
ranks. In tests its logits agree with those of transformers, in chunks and with other texts in the same step.
"""
_REFUSED = """
## Refused

Each is refused before weights are read, with a sentence that names the obstacle.

| Architecture | Obstacle |
|---|---|"""


def page(outcomes: Mapping[str, str]) -> str:
    """The page; `outcomes` has the architectures for which there is no class of our own."""
    runs = [fallback_row(name) for name, found in outcomes.items() if found == RUNS]
    refused = [refused_row(name, found) for name, found in outcomes.items() if found != RUNS]
    return "\n".join([_INTRODUCTION, _OWN, *own_rows(), _FALLBACK, *runs, _REFUSED, *refused, ""])


def row(architecture: str, found: str) -> str:
    """The line on the page of an architecture that has no class of our own."""
    return fallback_row(architecture) if found == RUNS else refused_row(architecture, found)


def own_rows() -> Iterator[str]:
    def module(entry: tuple[str, str]) -> str:
        return entry[1].partition(":")[0]

    for name, served in groupby(sorted([*ARCHITECTURES.items(), *_TEXTS], key=module), module):
        path = name.replace(".", "/")
        listed = ", ".join(f"`{architecture}`" for architecture in dict(served))
        yield f"| [{path}.py](../models/families/{path}.py) | {listed} |"


def fallback_row(architecture: str) -> str:
    return f"- `{architecture}`"


def refused_row(architecture: str, sentence: str) -> str:
    obstacle = sentence.removeprefix(f"{architecture} cannot run on transformers' code here: ")
    return f"| `{architecture}` | {obstacle} |"


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # the models are too small to share
    with tempfile.TemporaryDirectory() as folder:
        text = page({name: outcome(name, Path(folder, name)) for name in names() if name not in OWN})
    if not PAGE.exists() or PAGE.read_text() != text:
        PAGE.write_text(text)
        print(f"wrote docs/{PAGE.name}")


if __name__ == "__main__":
    main()
