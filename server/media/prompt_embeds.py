"""Embeddings that stand in place of a prompt's tokens: their checks, and how they are cut into items."""

from __future__ import annotations

import hashlib
from binascii import a2b_base64
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from server.errors import BadRequest
from server.media.prompt import ROWS_ID, Placed, Rows, cut_prompt
from server.media.tensor_files import is_matrix, read_matrix, without_batch
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
    rows = None if rows is None else without_batch(rows)
    if rows is None or not is_matrix(rows, width):
        shape = "" if rows is None else f", and these have the shape {list(rows.shape)}"
        raise BadRequest(
            f"prompt_embeds are finite numbers in rows of {width}, one for each token{shape}.",
            "prompt_embeds",
        )
    return rows


def cut_rows(rows: np.ndarray, first: int = 0) -> list[Rows]:
    """The embeddings of a prompt, or those at position `first`, in pieces, each of which is an item of it."""
    return [_piece(rows[at : at + _ROWS], first + at) for at in range(0, len(rows), _ROWS)]


def place_rows(
    ids: Sequence[int],
    placed: Sequence[Placed],
    files: Sequence[str],
    facts: Facts,
    keep: int | None,
    *,
    left: bool,
) -> tuple[list[int], list[Placed], list[Rows]]:
    """A prompt with the embeddings of `files` in place of each `ROWS_ID`, whose tokens are 0 then, cut to
    `keep` tokens: the last ones if `left`. Raises BadRequest."""
    left_over, found = list(files), list[tuple[int, np.ndarray]]()
    tokens: list[int] = []
    moved: list[int] = []
    """The position at which each of `ids` begins."""
    for id in ids:
        moved.append(len(tokens))
        if id == ROWS_ID:
            rows = read_rows(left_over.pop(0), facts)
            found.append((len(tokens), rows))
            tokens += [0] * len(rows)
        else:
            tokens.append(id)
    placed = [replace(each, at=moved[each.at]) for each in placed]
    keep = len(tokens) if keep is None else min(keep, len(tokens))
    start = len(tokens) - keep if left else 0
    tokens, placed = cut_prompt(tokens, placed, keep, left=left)
    pieces: list[Rows] = []
    for at, rows in found:
        kept = rows[max(0, start - at) : max(0, start + keep - at)]
        pieces += cut_rows(kept, max(0, at - start))
    return tokens, placed, pieces


def _piece(rows: np.ndarray, at: int) -> Rows:
    data, shape = rows.tobytes(), (*rows.shape, 4)
    return Rows(digest(("rows", shape), data), at, shape, memoryview(data))


def digest(facts: object, pixels: bytes | memoryview) -> bytes:
    """A hash of an item's bytes, and of what else decides what becomes of it."""
    found = hashlib.blake2b(msgspec.msgpack.encode(facts), digest_size=32)
    found.update(pixels)
    return found.digest()
