"""Finds which of several GGUF files is meant: publishers put many forms of a model side by side. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath

_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_BESIDE = re.compile(r"mmproj|imatrix", re.IGNORECASE)
"""Files that hold no language model: projectors of pictures, and statistics for quantizing."""
_MOST_SHOWN = 40


class SeveralFiles(ValueError):
    """No file is meant, or one of many could be; the message lists them."""


def choose(names: Iterable[str], quant: str | None, place: str) -> str:
    """The one file of `names`, paths within a folder, whose name has `quant` in it; of parts the first.

    `place` is the folder or hub id for messages.
    """
    models = sorted(
        name for name in names if not _LATER_PART.search(name) and not _BESIDE.search(PurePath(name).name)
    )
    if quant is not None:
        # Q4_K is not meant by Q4_K_M, nor by IQ4_K; letters of both cases are used.
        wanted = re.compile(rf"(?<![a-z0-9]){re.escape(quant)}(?![a-z0-9_])", re.IGNORECASE)
        found = [name for name in models if wanted.search(name)]
    else:
        found = models
    if len(found) == 1:
        return found[0]
    asked = "" if quant is None else f" of {quant}"
    if not models:
        raise SeveralFiles(f"{place} holds no GGUF file{asked}")
    shown = ", ".join((found or models)[:_MOST_SHOWN])
    if not found:
        raise SeveralFiles(f"{place} holds no GGUF file{asked}, but {shown}: name one of these with --quant")
    raise SeveralFiles(
        f"{place} holds several GGUF files{asked}: {shown}; say which with --quant, such as Q4_K_M"
    )
