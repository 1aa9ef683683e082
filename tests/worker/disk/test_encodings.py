"""What a tower made, in files: encodings of any length come back whole, or are missed."""

import time
from pathlib import Path

import numpy as np
import pytest

from worker.disk.block_files import Bytes
from worker.disk.block_folder import BlockFolder
from worker.disk.block_read import BlockRead
from worker.disk.block_store import BlockStore
from worker.disk.record_memory import Encodings, record_place

RECORD = 100


def names(number: int, nbytes: int) -> list[bytes]:
    return [b"item %03d record %03d" % (number, index) for index in range(-(-nbytes // RECORD))]


def places(number: int, nbytes: int) -> list[int]:
    return [record_place(number, index) for index in range(-(-nbytes // RECORD))]


def test_encodings_of_any_length_come_back(tmp_path: Path) -> None:
    made = np.random.default_rng(0)
    held = {size: made.integers(0, 256, size, np.uint8) for size in (1, 99, 100, 101, 5000)}
    before = Encodings(held.get, RECORD)
    store = BlockStore(BlockFolder(tmp_path, "one", 1 << 30), before)
    for size in held:
        store.write(names(size, size), places(size, size))
        assert store.rest(30)
    store.write(names(7, 300), places(7, 300))  # the worker has dropped it
    assert store.rest(30) and len(store) == 1 + 1 + 1 + 2 + 50
    store.close()

    after = Encodings(dict[int, Bytes]().get, RECORD)
    store = BlockStore(BlockFolder(tmp_path, "one", 1 << 30), after)
    for size, encoding in held.items():
        read = BlockRead(names(size, size), places(size, size))
        store.read(read)
        assert read.done.wait(30) and all(read.loaded)
        store.end(read, time.monotonic())
        assert np.array_equal(after.take(size, size), encoding)
    with pytest.raises(ValueError, match="some have not"):
        after.take(99, 99)
    assert store.totals.failures == 0
    store.close()
