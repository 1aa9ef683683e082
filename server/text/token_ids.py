"""Token ids: a list, or packed as 32-bit numbers where very many of them come from another process."""

from __future__ import annotations

from array import array

TokenIds = list[int] | bytes

_ID_BYTES = 4


def pack(ids: TokenIds) -> bytes:
    return ids if isinstance(ids, bytes) else array("i", ids).tobytes()


def unpack(ids: TokenIds) -> list[int]:
    return array("i", ids).tolist() if isinstance(ids, bytes) else ids


def count_ids(ids: TokenIds) -> int:
    return len(ids) // _ID_BYTES if isinstance(ids, bytes) else len(ids)
