"""Blocks in real files: they come back as they were, or not at all, whatever happens to the files."""

import os
import random
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worker.cache_tiers import block_files, block_folder
from worker.cache_tiers.block_files import Bytes
from worker.cache_tiers.block_folder import BlockFolder
from worker.cache_tiers.block_read import BlockRead
from worker.cache_tiers.block_store import BlockStore
from worker.cache_tiers.record_memory import BlockPieces

BLOCKS, SIZES = 40, (700, 5000, 64)
GENEROUS = 1 << 30


def memory(seed: int = 0) -> list[Bytes]:
    """The parts of a cache, with random bytes."""
    made = np.random.default_rng(seed)
    return [made.integers(0, 256, (BLOCKS, size), np.uint8) for size in SIZES]


def name_of(block: int) -> bytes:
    return b"name of block %03d" % block


def open_store(
    folder: Path, pieces: list[Bytes], identity: str = "one", budget: int = GENEROUS
) -> BlockStore:
    return BlockStore(BlockFolder(folder, identity, budget), BlockPieces(pieces))


def write(store: BlockStore, blocks: list[int]) -> None:
    for start in range(0, len(blocks), store.most):
        part = blocks[start : start + store.most]
        assert store.rest(30)
        store.write([name_of(block) for block in part], part)
    assert store.rest(30)


def read(store: BlockStore, blocks: list[int], into: list[int] | None = None) -> list[bool]:
    each = BlockRead([name_of(block) for block in blocks], into or blocks)
    store.read(each)
    assert each.done.wait(30)
    store.end(each, time.monotonic())
    return each.loaded


def files(folder: Path, ending: str = "*.blocks") -> list[Path]:
    return sorted(folder.rglob(ending))


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[BlockStore]:
    """A store with all blocks of a cache, five in a file."""
    store = open_store(tmp_path, memory())
    store.most = 5
    write(store, list(range(BLOCKS)))
    yield store
    store.close()


def same(one: list[Bytes], other: list[Bytes], block: int) -> bool:
    return all(np.array_equal(a[block], b[block]) for a, b in zip(one, other, strict=True))


def test_blocks_come_back_as_they_were_in_another_process(filled: BlockStore, tmp_path: Path) -> None:
    found = memory(1)
    store = open_store(tmp_path, found)
    assert len(store) == BLOCKS
    assert read(store, [3, 7, 30], [0, 1, 2]) == [True] * 3
    for place, block in enumerate((3, 7, 30)):
        assert all(np.array_equal(a[place], b[block]) for a, b in zip(found, memory(), strict=True))
    assert not same(found, memory(), 4)
    totals = store.totals
    assert (totals.read, totals.bytes_read, totals.failures) == (3, 3 * sum(SIZES), 0)
    store.close()


def test_nobody_else_can_read_the_files(filled: BlockStore, tmp_path: Path) -> None:
    modes = {stat.S_IMODE(path.stat().st_mode) for path in files(tmp_path)}
    assert modes == {0o600}
    [root] = tmp_path.iterdir()
    assert {stat.S_IMODE(each.stat().st_mode) for each in (root, *root.iterdir())} == {0o700}


def test_a_folder_that_is_made_is_for_nobody_else(tmp_path: Path) -> None:
    BlockFolder(tmp_path / "over" / "cache", "one", GENEROUS)
    made = (tmp_path / "over", tmp_path / "over" / "cache")
    assert [stat.S_IMODE(each.stat().st_mode) for each in made] == [0o700, 0o700]


@pytest.mark.parametrize("ending", ["blocks", "part"])
def test_a_fifo_in_place_of_a_file_is_not_opened(filled: BlockStore, tmp_path: Path, ending: str) -> None:
    fifo = files(tmp_path)[0].with_name(f"0-1.{ending}")
    os.mkfifo(fifo)
    opened: list[BlockStore] = []

    def open_and_tidy() -> None:
        store = open_store(tmp_path, memory(1))
        BlockFolder(tmp_path, "one", GENEROUS).tidy()
        opened.append(store)

    opening = threading.Thread(target=open_and_tidy, daemon=True)
    opening.start()
    opening.join(30)
    assert opened and read(opened[0], [3]) == [True]
    opened[0].close()
    assert not fifo.exists()


def test_a_device_is_not_opened() -> None:
    with pytest.raises(OSError, match="no regular file"):
        block_files.open_regular(Path("/dev/null"))


def test_other_identities_find_nothing(filled: BlockStore, tmp_path: Path) -> None:
    other = open_store(tmp_path, memory(1), "two")
    assert len(other) == 0 and not any(read(other, [1]))
    for path in files(tmp_path):  # as if somebody had renamed the folder
        path.rename(path.parent.parent / "two" / path.name)
    third = open_store(tmp_path, memory(1), "two")
    assert len(third) == 0
    other.close()
    third.close()


def test_engines_that_share_a_folder_find_what_the_others_write(tmp_path: Path) -> None:
    one, two = open_store(tmp_path, memory()), open_store(tmp_path, memory(1))
    write(one, [1, 2, 3])
    two.write([name_of(9)], [9])  # it looks around whenever it has written
    assert two.rest(30)
    assert read(two, [1, 2, 3]) == [True] * 3
    one.close()
    two.close()


def test_the_budget_is_never_passed_and_what_was_used_last_stays(tmp_path: Path) -> None:
    record = block_files.padded(sum(SIZES))
    budget = 7 * record + 5 * block_files.PAGE
    store = open_store(tmp_path, memory(), budget=budget)
    store.most = 2
    write(store, [0, 1])
    for path in files(tmp_path):
        os.utime(path, (1, 1))
    write(store, [2, 3, 4])
    assert read(store, [0]) == [True]
    for block in range(5, BLOCKS):
        write(store, [block])
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= budget
        if block < 8:
            assert name_of(0) in store
    assert len(store) <= 7 and name_of(2) not in store
    assert store.totals.failures == 0
    store.close()


def test_a_block_larger_than_the_budget_is_not_written(tmp_path: Path) -> None:
    store = open_store(tmp_path, memory(), budget=100)
    write(store, [0])
    assert not files(tmp_path) and store.totals.failures == 1 and not store.may_write
    store.close()


def test_a_folder_that_cannot_be_written_is_read(filled: BlockStore, tmp_path: Path) -> None:
    found = memory(1)
    store = open_store(tmp_path, found)

    def refuse(pieces: object) -> Path:
        raise OSError(30, "Read-only file system")

    store._folder.write = refuse  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    store.write([b"new"], [1])
    assert store.rest(30) and b"new" not in store
    assert read(store, [1]) == [True] and same(found, memory(), 1)
    store.close()


def test_a_read_can_be_given_up(filled: BlockStore, tmp_path: Path) -> None:
    found = memory(1)
    store = open_store(tmp_path, found)
    each = BlockRead([name_of(1)], [1])
    assert each.take() == 0
    store.end(each, time.monotonic())
    each.land(0, lambda: pytest.fail("the block belongs to others by now"))
    assert each.loaded == [False]
    store.close()


def damage(rnd: random.Random, path: Path) -> None:
    """Change something of a file: its length, some bits, pages, or all."""
    data = bytearray(path.read_bytes())
    place = rnd.randrange(len(data))
    match rnd.randrange(6):
        case 0:
            data = data[:place]
        case 1:
            data[place] ^= 1 << rnd.randrange(8)
        case 2:
            page = place // 4096 * 4096
            data[page : page + 4096] = bytes(4096)
        case 3:
            data += b"x"
        case 4:
            one, other = sorted((rnd.randrange(len(data) // 512), place // 512))
            first, second = data[one * 512 :][:512], data[other * 512 :][:512]
            data[one * 512 : one * 512 + 512], data[other * 512 : other * 512 + 512] = second, first
        case _:
            data = bytearray(rnd.randbytes(len(data)))
    path.write_bytes(data)


@pytest.mark.parametrize("part", range(4))
def test_damaged_files_give_no_wrong_block(part: int, tmp_path: Path) -> None:
    rnd, right, wrong = random.Random(part), memory(), 0
    store = open_store(tmp_path, right)
    store.most = 1
    write(store, list(range(BLOCKS)) + list(range(BLOCKS, BLOCKS)))
    early_memory = memory(2)
    early = open_store(tmp_path, early_memory)
    for path in files(tmp_path):
        damage(rnd, path)
    late_memory = memory(1)
    late = open_store(tmp_path, late_memory)
    lost = 0
    for reader, found in ((late, late_memory), (early, early_memory)):
        for block in range(BLOCKS):
            [loaded] = read(reader, [block])
            wrong += loaded and not same(found, right, block)
            lost += not loaded
    assert wrong == 0 and lost > BLOCKS
    for each in (store, early, late):
        each.close()


class Killed(BaseException):
    """What ends a process in the middle of its work."""


@given(st.integers(0, 60), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_process_that_is_killed_anywhere_leaves_whole_files_or_none(
    tmp_path_factory: pytest.TempPathFactory, calls: int, seed: int
) -> None:
    """It is killed at one of its calls of the system; another one finds whole blocks and room."""
    tmp_path, right, left = tmp_path_factory.mktemp("killed"), memory(), [calls]
    rnd = random.Random(seed)

    def dying(name: str) -> None:
        original = getattr(os, name)

        def call(*given: object, **named: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            if name == "pwrite" and rnd.random() < 0.5:  # a part is written only
                given = (given[0], given[1][: rnd.randrange(1, len(given[1]) + 1)], given[2])  # pyright: ignore
            return original(*given, **named)

        patch.setattr(os, name, call)

    folder = BlockFolder(tmp_path, "one", 30 * 8192)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a killed process tidies nothing up
        for name in ("open", "ftruncate", "pwrite", "rename", "stat", "scandir"):
            dying(name)
        try:
            for block in range(8):
                record = np.zeros((1, block_files.padded(sum(SIZES))), np.uint8)
                record[0, : sum(SIZES)] = np.concatenate([piece[block] for piece in right])
                digest = block_files.digest_of(name_of(block), record[0])
                head = block_files.Head("one", record.shape[1], [name_of(block)], [digest])
                folder.write([head.encode(), record.data.cast("B")])
        except Killed:
            pass
    found = memory(1)
    store = open_store(tmp_path, found, budget=30 * 8192)
    for block in range(8):
        if name_of(block) in store:
            assert read(store, [block]) == [True] and same(found, right, block)
    write(store, [20])
    assert name_of(20) in store and not files(tmp_path, "*.part")
    store.close()


def test_a_file_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, "one", 10 * 8192)
    seen = []

    def look(file: int, pieces: object) -> None:
        folder.tidy()
        seen.append(len(files(tmp_path, "*.part")))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_folder, "write_all", look)
        folder.write([bytes(8192)])
    assert seen == [1]
    folder.tidy()
    assert len(files(tmp_path)) == 1


def test_what_comes_before_a_lost_block_counts_though_it_lands_later() -> None:
    read = BlockRead([b"a", b"b", b"c"], [0, 1, 2])
    assert [read.take(), read.take()] == [0, 1]
    assert not read.land(1, None) and read.take() is None
    assert read.land(0, lambda: None) and read.done.is_set()
    assert read.loaded == [True, False, False]
