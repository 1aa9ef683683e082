"""Blocks of a card in the host's memory: they come back as they were saved, in whatever order lanes go on."""

import gc
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from card_world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from worker.cache_tiers.block_read import BlockRead
from worker.cache_tiers.host_copies import AtOnce, HostCopies, Lane, PinnedRecords, make_copies
from worker.cache_tiers.host_store import HostStore

BLOCKS, WIDTHS = 12, (16, 40, 8)


def memory() -> list[Tensor]:
    return [torch.randint(0, 256, (BLOCKS, width), dtype=torch.uint8) for width in WIDTHS]


def no_pin(_: Tensor) -> Callable[[], None]:
    return lambda: None


@contextmanager
def opened(
    parts: list[Tensor], slots: int = BLOCKS, most: int = 3, lanes: tuple[Lane, Lane] | None = None
) -> Generator[HostStore]:
    steps, beside = lanes or (AtOnce(), AtOnce())
    held = PinnedRecords(slots, sum(part[0].nbytes for part in parts), no_pin)
    store = HostStore(HostCopies(parts, held, steps, beside, most))
    while held.ready < slots:
        time.sleep(1e-3)
    try:
        yield store
    finally:
        if lanes is None:
            store.close()


def name_of(block: int) -> bytes:
    return b"name of block %03d" % block


def save(store: HostStore, blocks: list[int]) -> None:
    for first in range(0, len(blocks), store.most):
        some = blocks[first : first + store.most]
        assert store.rest(10) and store.may_write
        store.write([name_of(block) for block in some], some)
    assert store.rest(10)


def bring(store: HostStore, blocks: list[int], into: list[int]) -> list[bool]:
    read = BlockRead([name_of(block) for block in blocks], into)
    store.read(read)
    assert read.done.wait(10)
    store.end(read, time.monotonic())
    return read.loaded


@pytest.mark.parametrize("widths", [WIDTHS, (3, 5), (8,)])
def test_all_parts_of_a_block_come_back(widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.cache_tiers.host_copies._CHUNK", 5 * sum(widths))
    parts = [torch.randint(0, 256, (BLOCKS, width), dtype=torch.uint8) for width in widths]
    before = [part.clone() for part in parts]
    with opened(parts) as store:
        save(store, [*range(BLOCKS)])
        for part in parts:
            part.zero_()
        order = [7, 0, 11, 3, 4]
        assert bring(store, order, [1, 2, 3, 4, 5]) == [True] * 5
        assert all(torch.equal(part[1:6], old[order]) for part, old in zip(parts, before, strict=True))
        totals = store.totals
        assert (totals.written, totals.read, totals.bytes_read) == (BLOCKS, 5, 5 * sum(widths))
        assert totals.held == BLOCKS * sum(widths)


def test_those_used_longest_ago_give_way_and_what_is_lost_ends_a_read() -> None:
    with opened(memory(), slots=4) as store:
        save(store, [0, 1, 2, 3])
        bring(store, [0, 1], [8, 9])
        save(store, [4, 5, 6])
        assert [name_of(block) in store for block in range(7)] == [True, *[False] * 3, *[True] * 3]
        assert bring(store, [4, 5, 2, 6], [8, 9, 10, 11]) == [True, True, False, False]
        store.forget_all()
        assert not store.names() and bring(store, [4], [8]) == [False]
        save(store, [7])
        assert store.names() == {name_of(7)} and store.totals.held == store.block_bytes


def test_after_an_error_nothing_is_found_and_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(memory()) as store:
        save(store, [0, 1])

        def fail(*_: object) -> None:
            raise RuntimeError("no card any more")

        monkeypatch.setattr(HostCopies, "save", fail)
        store.write([name_of(2)], [2])
        assert store.rest(10) and not store.may_write
        assert name_of(0) not in store and bring(store, [0], [8]) == [False]
        assert store.totals.failures == 1


def test_memory_that_is_not_pinned_is_not_used() -> None:
    def refuse(_: Tensor) -> Callable[[], None]:
        raise RuntimeError("operation not permitted")

    copies = make_copies(memory(), 1000, AtOnce(), AtOnce(), refuse)
    assert copies is not None and copies.slots == 1000 // sum(WIDTHS)
    store = HostStore(copies)
    save(store, [0, 1])
    assert not store.names() and store.totals.written == 0
    store.close()
    assert make_copies(memory(), 63, AtOnce(), AtOnce(), refuse) is None


def test_a_store_that_is_closed_holds_no_memory() -> None:
    array = np.zeros((BLOCKS, 64), np.uint8)
    cache = weakref.ref(array)
    with opened([torch.from_numpy(array)]) as store:
        del array
        save(store, [0, 1])
        assert cache() is not None
    gc.collect()
    assert cache() is None and not store.names()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_steps_find_what_they_should_in_any_order_of_lanes(seed: int) -> None:
    world = World(seed, BLOCKS, WIDTHS)
    with opened(world.parts, slots=8, lanes=world.lanes) as store:
        for block in range(BLOCKS):
            world.overwrite(block)
        for _ in range(40):
            act, idle = world.random.randrange(5), world.idle
            if act == 0:
                with world.card.hurrying():
                    assert store.rest(10)
                blocks = world.random.sample(idle, min(3, len(idle)))
                store.write([world.name(world.holds[block]) for block in blocks], blocks)
                for block in blocks:  # at once
                    world.overwrite(block)
            elif act == 1 and len(idle) > 4 and (names := sorted(store.names())):
                names = world.random.sample(names, min(len(names), 4))
                read = BlockRead(names, world.random.sample(idle, len(names)))
                world.reads.append(read)
                for block in read.blocks:
                    world.overwrite(block)  # by a step that was started before
                store.read(read)
            elif act == 2 and world.reads:
                read = world.random.choice(world.reads)
                if world.random.random() < 0.6:
                    world.wait(read)
                world.end(store, read)
            world.look()
        with world.card.hurrying():
            for read in [*world.reads]:
                assert read.done.wait(10)
                world.end(store, read)
            world.look()
            world.steps.mark().synchronize()
            store.close()
    assert not world.wrong
    assert store.totals.failures == 0
