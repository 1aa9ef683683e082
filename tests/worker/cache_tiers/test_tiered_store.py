"""A card's blocks in files, through the host's memory: they come back as they were, whatever the order."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from card_world import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from worker.cache_tiers.block_folder import BlockFolder
from worker.cache_tiers.block_read import BlockRead
from worker.cache_tiers.block_store import BlockStore
from worker.cache_tiers.host_copies import AtOnce, HostCopies, Lane, PinnedRecords
from worker.cache_tiers.tiered_store import PinnedMemory, TieredStore

BLOCKS, WIDTHS = 12, (16, 40, 8)
RECORD = sum(WIDTHS)


def memory() -> list[Tensor]:
    return [torch.randint(0, 256, (BLOCKS, width), dtype=torch.uint8) for width in WIDTHS]


@contextmanager
def opened(
    folder: Path,
    parts: list[Tensor],
    slots: int = 2 * BLOCKS,
    lanes: tuple[Lane, Lane] | None = None,
    budget: int = 1 << 30,
) -> Generator[TieredStore]:
    """A store with a quarter of its slots aside, which saves three blocks at once."""
    steps, beside = lanes or (AtOnce(), AtOnce())
    pinned = PinnedRecords(slots, RECORD, lambda _: lambda: None)
    copies = HostCopies(parts, pinned, steps, beside, 3)
    files = BlockStore(BlockFolder(folder, "one", budget), PinnedMemory(copies))
    store = TieredStore(copies, files)
    while pinned.ready < slots:
        time.sleep(1e-3)
    try:
        yield store
    finally:
        if lanes is None:
            store.close()


def name_of(block: int) -> bytes:
    return b"name of block %03d" % block


def save(store: TieredStore, blocks: list[int]) -> None:
    for first in range(0, len(blocks), store.most):
        some = blocks[first : first + store.most]
        assert store.rest(10) and store.may_write
        store.write([name_of(block) for block in some], some)
    assert store.rest(10)


def bring(store: TieredStore, blocks: list[int], into: list[int]) -> list[bool]:
    read = BlockRead([name_of(block) for block in blocks], into)
    store.read(read)
    assert read.done.wait(10)
    store.end(read, time.monotonic())
    return read.loaded


def test_all_is_in_files_and_the_newest_in_memory(tmp_path: Path) -> None:
    parts = memory()
    before = [part.clone() for part in parts]
    with opened(tmp_path, parts, slots=8) as store:
        save(store, [*range(9)])
        assert len(store) == 9 == len(store.names()) and store.totals.written == 9
        for part in parts:
            part.zero_()
        assert bring(store, [7, 8, 0, 1], [0, 1, 2, 3]) == [True] * 4
        assert all(torch.equal(part[:4], old[[7, 8, 0, 1]]) for part, old in zip(parts, before, strict=True))
        assert (store.totals.read, store.totals.bytes_read) == (4, 4 * RECORD)


def test_a_new_store_finds_what_was_written(tmp_path: Path) -> None:
    parts = memory()
    before = [part.clone() for part in parts]
    with opened(tmp_path, parts) as store:
        save(store, [*range(BLOCKS)])
    for part in parts:
        part.zero_()
    with opened(tmp_path, parts) as store:
        assert bring(store, [*range(6)], [*range(5, -1, -1)]) == [True] * 6
        assert all(torch.equal(part[:6].flip(0), old[:6]) for part, old in zip(parts, before, strict=True))


def test_what_has_no_room_on_its_way_is_left_out(tmp_path: Path) -> None:
    """Two slots of eight are aside."""
    with opened(tmp_path, parts := memory()) as store:
        save(store, [0, 1, 2, 3, 4])
    before = [part.clone() for part in parts]
    with opened(tmp_path, parts, slots=8) as store:
        for _ in range(3):
            assert bring(store, [0, 1, 2, 3], [8, 9, 10, 11]) == [True, True, False, False]
        assert all(torch.equal(part[8:10], old[:2]) for part, old in zip(parts, before, strict=True))


def test_what_a_file_has_lost_ends_a_read(tmp_path: Path) -> None:
    with opened(tmp_path, parts := memory()) as store:
        save(store, [0, 1, 2])
    [file] = tmp_path.rglob("*.blocks")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with opened(tmp_path, parts) as store:
        found = bring(store, [0, 1, 2], [5, 6, 7])  # of two readers the one behind may find the file given up
        assert found == sorted(found, reverse=True) and not found[2]
        assert store.totals.failures == 1 and not store.names()
        save(store, [0])
        store.forget_all()
        assert not store.names() and bring(store, [0], [1]) == [False]


@pytest.mark.parametrize("ended", [True, False])
def test_what_is_given_up_while_files_are_read_goes_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    with opened(tmp_path, parts := memory(), slots=8) as store:
        save(store, [0, 1])
    go_on, find = threading.Event(), BlockStore._find  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(BlockStore, "_find", lambda *where: go_on.wait(10) and find(*where))
    with opened(tmp_path, parts, slots=8) as store:
        read = BlockRead([name_of(0), name_of(1)], [8, 9])
        before = [part.clone() for part in parts]
        store.read(read)
        read.give_up()
        if ended:
            store.end(read, time.monotonic())
        go_on.set()
        deadline = time.monotonic() + 10
        while len(store._free) < 2:  # pyright: ignore[reportPrivateUsage]
            assert time.monotonic() < deadline, "slots are not left"
            time.sleep(1e-3)
        assert all(torch.equal(part, old) for part, old in zip(parts, before, strict=True))
        if not ended:
            store.end(read, time.monotonic())
        assert bring(store, [0, 1], [10, 11]) == [True, True]


def test_a_card_that_fails_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, memory()) as store:
        save(store, [0, 1])

        def fail(*_: object) -> None:
            raise RuntimeError("no card any more")

        monkeypatch.setattr(HostCopies, "bring", fail)
        assert bring(store, [0, 1], [8, 9]) == [False, False]
        assert name_of(0) not in store and not store.names() and not store.may_write


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1 << 30),
    slots=st.sampled_from([6, 10, 30]),
    budget=st.sampled_from([50_000, 1 << 30]),
)
def test_steps_find_what_they_should_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, seed: int, slots: int, budget: int
) -> None:
    """Blocks are brought from memory and files at once, reads are given up, and files give way."""
    world = World(seed, BLOCKS, WIDTHS)
    with opened(tmp_path_factory.mktemp("files"), world.parts, slots, world.lanes, budget) as store:
        for block in range(BLOCKS):
            world.overwrite(block)
        for _ in range(40):
            act, idle = world.random.randrange(6), world.idle
            if act <= 1:
                with world.card.hurrying():
                    assert store.rest(10)
                blocks = world.random.sample(idle, min(3, len(idle)))
                store.write([world.name(world.holds[block]) for block in blocks], blocks)
                for block in blocks:  # at once
                    world.overwrite(block)
            elif act <= 3 and len(idle) > 5 and (names := sorted(store.names())):
                names = world.random.sample(names, min(len(names), 5))
                read = BlockRead(names, world.random.sample(idle, len(names)))
                world.reads.append(read)
                for block in read.blocks:
                    world.overwrite(block)  # by a step that was started before
                store.read(read)
            elif act == 4 and world.reads:
                read = world.random.choice(world.reads)
                if world.random.random() < 0.6:
                    world.wait(read)
                world.end(store, read)
            world.look()
        for read in [*world.reads]:
            world.wait(read)
            world.end(store, read)
        with world.card.hurrying():
            world.look()
            world.steps.mark().synchronize()
            store.close()
    assert not world.wrong
    assert store.totals.failures == 0
