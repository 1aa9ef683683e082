"""Prepared media items that are kept for later requests, by the hash of their files and by names."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import msgspec

from models.media.item import Prepared

MOST_NAMES = 1 << 16
_OVERHEAD = 1024
"""Bytes that an item takes beside its pixels, at most."""


class KeptItem(msgspec.Struct, frozen=True):
    """A prepared item, and the hash of its file and of all settings, by which every floor knows it."""

    hash: bytes
    prepared: Prepared


class MediaCache:
    """The items used last, as many as so many bytes hold."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._items: OrderedDict[bytes, KeptItem] = OrderedDict()
        self._names: OrderedDict[bytes, bytes] = OrderedDict()
        """The hash of each named item, by digest of the name and of who may use it."""
        self.bytes = self.queries = self.hits = 0

    def get(self, hash: bytes) -> KeptItem | None:
        self.queries += 1
        if (item := self._items.get(hash)) is not None:
            self.hits += 1
            self._items.move_to_end(hash)
        return item

    def put(self, item: KeptItem) -> KeptItem:
        """Keep an item, unless it is larger than all that may be kept; returns the one that is kept."""
        if (known := self._items.get(item.hash)) is not None:
            return known
        if _size(item) > self._most_bytes:
            return item
        self._items[item.hash] = item
        self.bytes += _size(item)
        while self.bytes > self._most_bytes:
            _, dropped = self._items.popitem(last=False)
            self.bytes -= _size(dropped)
        return item

    def clear(self) -> None:
        """Drop all items, and their names."""
        self._items.clear()
        self._names.clear()
        self.bytes = 0

    def name(self, uuid: str, key: str, salt: str, item: KeptItem) -> None:
        """Name an item for later requests with the same API key and cache salt."""
        name = _digest(uuid, key, salt)
        self._names[name] = item.hash
        self._names.move_to_end(name)
        if len(self._names) > MOST_NAMES:
            self._names.popitem(last=False)

    def named(self, uuid: str, key: str, salt: str) -> KeptItem | None:
        """The item that has a name with this API key and cache salt; None if it is not kept any more."""
        hash = self._names.get(_digest(uuid, key, salt))
        return None if hash is None else self.get(hash)


def _size(item: KeptItem) -> int:
    return item.prepared.pixels.nbytes + _OVERHEAD


def _digest(*parts: str) -> bytes:
    data = msgspec.msgpack.encode([part.encode("utf-8", "surrogatepass") for part in parts])
    return hashlib.blake2b(data, digest_size=32).digest()
