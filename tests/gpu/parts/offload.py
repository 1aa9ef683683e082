"""Blocks that go to the host's pinned memory, and to files, and come back: the same bytes, and how fast."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from dummy import GREEDY, Dummy, opened
from results import Result
from workbench import Part, Workbench

from worker.cache_tiers.block_read import BlockRead
from worker.cache_tiers.host_store import HostStore
from worker.cache_tiers.tiered_store import TieredStore

_GIB, _BLOCKS, _PATIENCE = 2.0, 96, 30.0
_NAMES = [b"block %d" % block for block in range(_BLOCKS)]


@contextmanager
def _keeping(
    bench: Workbench, **options: Any
) -> Iterator[tuple[Dummy, HostStore | TieredStore, list[torch.Tensor]]]:
    """A worker with pinned memory of the host, and the parts of its cache, in random bytes."""
    size = _GIB if bench.on_card else 0.01
    shape, blocks = bench.shape("0.6B"), 3 * _BLOCKS
    with opened(bench, shape, blocks=blocks, kv_offloading_size=size, **options) as dummy:
        store = dummy.runner.store
        assert isinstance(store, HostStore | TieredStore)
        copies: Any = store._copies  # pyright: ignore[reportPrivateUsage]
        until = time.monotonic() + _PATIENCE
        while copies.ready < copies.slots and time.monotonic() < until:
            time.sleep(0.01)
        parts = [*dummy.runner._cache.parts]  # pyright: ignore[reportPrivateUsage]
        for part in parts:
            part.view(torch.uint8).random_(0, 120)
        yield dummy, store, parts


def _save(store: HostStore | TieredStore, blocks: list[int]) -> float:
    """Save blocks -> the seconds in which whoever starts steps was held up."""
    held_up = 0.0
    for first in range(0, len(blocks), store.most):
        assert store.rest(_PATIENCE)
        some, began = blocks[first : first + store.most], time.perf_counter()
        store.write([_NAMES[block] for block in some], some)
        held_up += time.perf_counter() - began
    return held_up


def _bring(store: HostStore | TieredStore, blocks: list[int], places: list[int]) -> BlockRead:
    read = BlockRead([_NAMES[block] for block in blocks], places)
    store.read(read)
    return read


def compare_blocks(bench: Workbench) -> Iterator[Result]:
    """Blocks are overwritten as soon as they are being saved, and come back to others."""
    with _keeping(bench, rows=1, longest=64) as (_, store, parts):
        began, count = time.perf_counter(), store.totals
        order = [*range(_BLOCKS)]
        before = [part[:_BLOCKS].clone() for part in parts]
        for first in range(0, _BLOCKS, store.most):
            _save(store, order[first : first + store.most])
            for part in parts:
                part[first : first + store.most] = 0
        assert store.rest(_PATIENCE)
        saved = time.perf_counter() - began
        began, places = time.perf_counter(), [2 * _BLOCKS - 1 - block for block in order]
        read = _bring(store, order, places)
        assert read.done.wait(_PATIENCE)
        brought = time.perf_counter() - began
        store.end(read, time.monotonic())
        differ = sum(not torch.equal(part[places], old) for part, old in zip(parts, before, strict=True))
        differ += sum(bool(part[:_BLOCKS].any()) for part in parts) + read.loaded.count(False)
        text = f"{differ} parts or blocks are wrong" if differ else "as they were saved"
        yield Result("blocks from the host's memory", text, wrong=differ)
        nbytes = store.totals.bytes_written - count.bytes_written
        yield Result(
            "blocks to the host's memory", "while they are overwritten", nbytes / saved / 1e9, "GB/s"
        )
        yield Result("blocks back to the card", "", nbytes / brought / 1e9, "GB/s")


def compare_files(bench: Workbench) -> Iterator[Result]:
    """Blocks are written to files, and another worker on the same card brings them back."""
    order = [*range(_BLOCKS // 3)]  # so that all have room in what is set aside for files
    places = [_BLOCKS + block for block in order]
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        with _keeping(bench, rows=1, longest=64, kv_cache_dir=folder) as (_, store, parts):
            before = [part[: len(order)].clone() for part in parts]
            began = time.perf_counter()
            _save(store, order)
            assert store.rest(_PATIENCE)
            saved = time.perf_counter() - began
            nbytes = store.totals.bytes_written
        with _keeping(bench, rows=1, longest=64, kv_cache_dir=folder) as (_, store, parts):
            began = time.perf_counter()
            read = _bring(store, order, places)
            assert read.done.wait(_PATIENCE)
            brought = time.perf_counter() - began
            differ = sum(not torch.equal(part[places], old) for part, old in zip(parts, before, strict=True))
            differ += read.loaded.count(False)
    text = f"{differ} parts or blocks are wrong" if differ else "as they were written"
    yield Result("blocks from files", text, wrong=differ)
    yield Result("blocks to files", "", nbytes / saved / 1e9, "GB/s")
    yield Result("blocks from files to the card", "", nbytes / brought / 1e9, "GB/s")


def measure_steps(bench: Workbench) -> Iterator[Result]:
    """Decoding while blocks travel in both directions, and what a copy takes of who starts steps."""
    rows, steps = bench.size(32, 2), bench.size(64, 2)
    length = bench.tokens(512)
    with _keeping(bench, rows=rows, longest=length + steps + 300) as (dummy, store, _):
        dummy.make_graphs()
        plain, _ = dummy.decode(rows, length, steps, GREEDY)
        blocks = [*range(min(store.most, _BLOCKS))]
        held_up = _save(store, blocks)
        assert store.rest(_PATIENCE)
        reads: list[BlockRead] = []
        for first in range(4):
            places = [2 * _BLOCKS + (first * len(blocks) + block) % _BLOCKS for block in blocks]
            reads.append(_bring(store, blocks, places))
        beside, _ = dummy.decode(rows, length, steps, GREEDY)
        assert all(read.done.wait(_PATIENCE) for read in reads)
        yield Result("a step beside copies", f"{beside / plain:.2f} times one without", 1e3 * beside, "ms")
        yield Result(f"saving {len(blocks)} blocks", "holds up who starts steps for", 1e3 * held_up, "ms")


PARTS = (
    Part("blocks", compare_blocks, 40),
    Part("files", compare_files, 40),
    Part("steps", measure_steps, 40),
)
