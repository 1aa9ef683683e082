"""Embeddings that stand in place of a prompt's tokens: their checks, and how they are cut into items."""

from __future__ import annotations

import hashlib
from binascii import a2b_base64

import msgspec
import numpy as np

from server.errors import BadRequest
from server.media.prompt import Rows
from server.media.tensor_files import is_matrix, read_matrix
from server.model_facts import Facts

_ROWS = 256
"""The embeddings of an item: what cached prefixes and steps are cut into."""


def row_width(facts: Facts) -> int:
    """How many numbers an embedding has. Raises BadRequest where prompts of embeddings are not allowed."""
    if width := facts.ready.worker.row_width:
        return width
    raise BadRequest(
        "prompt_embeds are not allowed: the operator has to give --enable-prompt-embeds "
        "(enable_prompt_embeds=True).",
        "prompt_embeds",
    )


def read_rows(file: str, facts: Facts) -> np.ndarray:
    """The embeddings [N, hidden size] of a file in base64. Raises BadRequest."""
    width = row_width(facts)
    try:
        rows = read_matrix(a2b_base64(file, strict_mode=True))
    except MemoryError:
        raise
    except Exception:  # libraries raise whatever they like for files that anybody may have written
        raise BadRequest(
            "Each of prompt_embeds is the base64 of a file that torch.save wrote of one contiguous tensor "
            f"[tokens, {width}] in float32, float16 or bfloat16, or of a safetensors or .npy file with one.",
            "prompt_embeds",
        ) from None
    return check_rows(rows, width)


def check_rows(rows: np.ndarray | None, width: int) -> np.ndarray:
    """The embeddings, if they are finite and have this width. Raises BadRequest."""
    if rows is None or not is_matrix(rows, width):
        shape = "" if rows is None else f", and these have the shape {list(rows.shape)}"
        raise BadRequest(
            f"prompt_embeds are finite numbers in rows of {width}, one for each token{shape}.",
            "prompt_embeds",
        )
    return rows


def cut_rows(rows: np.ndarray) -> list[Rows]:
    """The embeddings of a prompt in pieces, each of which is an item of it."""
    return [_piece(rows[at : at + _ROWS], at) for at in range(0, len(rows), _ROWS)]


def _piece(rows: np.ndarray, at: int) -> Rows:
    data, shape = rows.tobytes(), (*rows.shape, 4)
    return Rows(digest(("rows", shape), data), at, shape, memoryview(data))


def digest(facts: object, pixels: bytes | memoryview) -> bytes:
    """A hash of an item's bytes, and of what else decides what becomes of it."""
    found = hashlib.blake2b(msgspec.msgpack.encode(facts), digest_size=32)
    found.update(pixels)
    return found.digest()
