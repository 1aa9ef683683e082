"""Prompts of embeddings, which programs give in place of a text's tokens."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np

from engine_core.prompt_media import Media
from server.errors import BadRequest
from server.model_facts import Facts
from server.offline.program_media import Encoded
from server.requests.sampling import SamplingParams
from worker.buffers import Buffer

_ROWS = 256
"""The embeddings of an item: what cached prefixes and steps are cut into."""


def encode_rows(given: Any, params: SamplingParams, facts: Facts) -> Encoded:
    """Encodes embeddings [N, hidden size], a tensor of torch or an array of NumPy. Raises BadRequest."""
    width = facts.ready.worker.row_width
    if not width:
        raise BadRequest(
            "prompt_embeds are not allowed: the operator has to give --enable-prompt-embeds "
            "(enable_prompt_embeds=True).",
            "prompt_embeds",
        )
    rows = _as_array(given)
    if rows is None or rows.ndim != 2 or rows.shape[1] != width or not np.isfinite(rows).all():
        shape = "" if rows is None else f", and these have the shape {list(rows.shape)}"
        raise BadRequest(
            f"prompt_embeds are finite numbers in rows of {width}, one for each token{shape}.",
            "prompt_embeds",
        )
    rows = rows[len(rows) - len(params.cut_prompt([0] * len(rows), facts)) :]
    media = [_item(rows[at : at + _ROWS], at) for at in range(0, len(rows), _ROWS)]
    return Encoded(None, [0] * len(rows), tuple(media))


def _as_array(given: Any) -> np.ndarray | None:
    """The float32 values of a tensor or array; None if they are no real floats."""
    if hasattr(given, "detach"):  # torch's, of which NumPy has no bfloat16
        given = given.detach().cpu()
        given = given.float().numpy() if given.is_floating_point() and not given.is_sparse else None
    real = isinstance(given, np.ndarray) and given.dtype.kind == "f"
    return np.ascontiguousarray(given, np.float32) if real else None


def _item(rows: np.ndarray, at: int) -> Media:
    count, width = rows.shape
    pixels, shape = rows.tobytes(), (count, width, 4)
    digest = hashlib.blake2b(msgspec.msgpack.encode(("rows", shape)), digest_size=32)
    digest.update(pixels)
    grid = (1, 1, count)
    return Media(digest.digest(), "rows", at, count, ((0, count),), shape, grid, Buffer(pixels))
