"""The hashes under which cache blocks are found: of a block's tokens, and of all tokens before them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

_HASH_BYTES = 16


def root_hash(salt: str) -> bytes:
    """The hash with which a chain of block hashes begins. Sequences of different salts share no block."""
    return hashlib.blake2b(salt.encode(), digest_size=_HASH_BYTES).digest()


def own_salt(salt: str, prompt: list[int], marks: Iterable[tuple[bytes, int]]) -> str:
    """Make a salt for a prompt whose blocks only prompts with the same tokens and marks may share."""
    return f"{salt} {chain_hash(root_hash(salt), prompt, marks).hex()}"


def chain_hash(parent: bytes, tokens: list[int], marks: Iterable[tuple[bytes, int]] = ()) -> bytes:
    """The hash of a block's tokens and, through `parent`, of all tokens before them.

    `marks` say what else decides its content, each with its place counted from the block's first token. The
    hash is cryptographic: with a weaker one, a prompt could be made to find somebody else's block.
    """
    data = parent + array("i", tokens).tobytes()
    for mark, place in marks:
        data += array("q", (len(mark), place)).tobytes() + mark
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()
