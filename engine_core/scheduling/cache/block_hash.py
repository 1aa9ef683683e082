"""The hashes under which cache blocks are found: of a block's tokens, and of all tokens before them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

_HASH_BYTES = 16


def root_hash(salt: str, adapter: str = "") -> bytes:
    """The hash with which a chain of block hashes begins. Sequences of different salts share no block, nor do
    those that different adapters compute, which are told apart by their digests."""
    root = hashlib.blake2b(salt.encode(), digest_size=_HASH_BYTES).digest()
    return adapted(root, adapter) if adapter else root


def adapted(parent: bytes, adapter: str) -> bytes:
    """The hash of all tokens before a block that an adapter computes, as the parent of that block's."""
    data = parent + adapter.encode()
    return hashlib.blake2b(data, digest_size=_HASH_BYTES, person=b"adapter").digest()


def own_salt(salt: str, prompt: list[int], media: Iterable[tuple[bytes, int]]) -> str:
    """Make a salt for a prompt whose blocks only prompts with the same tokens and media may share."""
    return f"{salt} {chain_hash(root_hash(salt), prompt, media).hex()}"


def chain_hash(parent: bytes, tokens: list[int], media: Iterable[tuple[bytes, int]] = ()) -> bytes:
    """The hash of a block's tokens and, through `parent`, of all tokens before them.

    `media` has the hash of each item that overlaps the block, and its place counted from the block's first
    token. The hash is cryptographic: with a weaker one, a prompt could be made to find somebody else's block.
    """
    data = parent + array("i", tokens).tobytes()
    for hash, place in media:
        data += array("q", (len(hash), place)).tobytes() + hash
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()
