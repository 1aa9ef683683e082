"""Options of vectors: how texts are read for them, and the space they are from."""

from __future__ import annotations

from typing import Annotated

import msgspec

from worker.options import MODEL, OptionDoc


class VectorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the vectors that a model makes."""

    int8_ranges: Annotated[str | None, OptionDoc(MODEL)] = None
    """A file with the least and the greatest of each number of vectors, for the types int8 and uint8: .npy,
    or two lists in JSON. Without it, the ranges are those of each request's own vectors."""
    default_prompt_name: Annotated[str | None, OptionDoc(MODEL)] = None
    """The prompt that is written before texts to embed where a request names none."""
    space_name: Annotated[str | None, OptionDoc(MODEL)] = None
    """Your name for the space of the model's vectors, in place of digests of its weights and tokenizer; with
    NAME=DIGEST the server starts only if these are still the ones of that digest (docs/spaces.md)."""
