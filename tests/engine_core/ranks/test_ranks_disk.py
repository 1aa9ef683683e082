"""Blocks on the disks of several ranks: they are back where all ranks have their part, with the same bits."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import numpy as np
import pytest
import torch
from bits_traffic import Result, answers
from sizes import engine_config
from tiny import VOCAB_SIZE, tiny_checkpoint

from engine_core.engine import Engine
from engine_core.protocol import AddRequest
from engine_core.ranks.ranks_disk import RanksDisk
from worker.cache_tiers.block_folder import BlockFolder
from worker.cache_tiers.block_read import BlockRead
from worker.cache_tiers.block_store import BlockStore
from worker.cache_tiers.host_copies import AtOnce, make_copies
from worker.cache_tiers.host_store import HostStore
from worker.cache_tiers.record_memory import BlockPieces
from worker.protocol import Sampling
from worker.ranks.channel import DiskNews, DiskOrder
from worker.ranks.rank_disk import RankDisk

BLOCKS, RANKS = 12, 2
NAMES = [b"name of block %03d" % block for block in range(BLOCKS)]


class Served:
    """Ranks with stores of their own, one of which may have states, and the engine's view of them."""

    def __init__(self, folder: Path, seed: int) -> None:
        made = np.random.default_rng(seed)
        self.memories = [made.integers(0, 256, (BLOCKS, 5000 + rank), np.uint8) for rank in range(RANKS)]
        self.stores = [
            BlockStore(BlockFolder(folder, f"rank{rank}", 1 << 30), BlockPieces([memory]))
            for rank, memory in enumerate(self.memories)
        ]
        self.told: SimpleQueue[tuple[int, DiskNews]] = SimpleQueue()
        self.disk = RanksDisk(self._order, self.receive, RANKS)
        self.ranks = [RankDisk(store, self._teller(rank)) for rank, store in enumerate(self.stores)]
        self.receive(0)

    def _teller(self, rank: int) -> Callable[[DiskNews], None]:
        return lambda news: self.told.put((rank, news))

    def _order(self, order: DiskOrder) -> None:
        for rank in self.ranks:
            rank.obey(order)

    def receive(self, milliseconds: int) -> None:
        try:
            self.disk.hear(*self.told.get(timeout=max(1, milliseconds) / 1000))
            while True:
                self.disk.hear(*self.told.get_nowait())
        except Empty:
            pass

    def write(self, blocks: list[int]) -> None:
        assert self.disk.may_write
        self.disk.write([NAMES[block] for block in blocks], blocks)
        assert not self.disk.may_write
        assert self.disk.rest(30)

    def read(self, blocks: list[int]) -> list[bool]:
        read = BlockRead([NAMES[block] for block in blocks], blocks)
        self.disk.read(read)
        self.disk.wait_for(read, 30)
        assert read.done.is_set()
        self.disk.end(read, time.monotonic())
        self.receive(0)
        return read.loaded

    def close(self) -> None:
        for store in self.stores:
            store.close()


@pytest.fixture
def open_ranks(tmp_path: Path) -> Iterator[Callable[[int], Served]]:
    opened: list[Served] = []

    def start(seed: int) -> Served:
        opened.append(Served(tmp_path, seed))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_what_all_ranks_have_comes_back(open_ranks: Callable[[int], Served]) -> None:
    first = open_ranks(0)
    first.write([0, 1, 2, 3])
    first.receive(500)  # a rank may tell of its last blocks after it has said that it rests
    assert NAMES[3] in first.disk and NAMES[4] not in first.disk
    second = open_ranks(1)
    assert second.disk.opened() is second.disk and second.disk.states is None
    assert second.read([0, 2, 3]) == [True] * 3
    for one, other in zip(first.memories, second.memories, strict=True):
        assert [np.array_equal(one[block], other[block]) for block in range(4)] == [True, False, True, True]
    totals = second.disk.totals
    assert (totals.written, totals.read, totals.bytes_read, totals.failures) == (0, 3, 3 * 10001, 0)


def test_what_one_rank_has_lost_is_not_back(open_ranks: Callable[[int], Served], tmp_path: Path) -> None:
    open_ranks(0).write([0, 1, 2, 3])
    second = open_ranks(1)
    [path] = tmp_path.glob("facet-*/rank1/*.blocks")
    path.write_bytes(path.read_bytes()[:-8200])  # the last block, and a piece of the one before it
    loaded = second.read([0, 1, 2, 3])
    assert loaded[2:] == [False, False]
    assert second.disk.totals.failures in (1, 2)  # two readers
    assert not any(name in second.disk for name in NAMES), "one rank has them, and that is of no use"
    third = open_ranks(2)
    assert not any(name in third.disk for name in NAMES)


def test_a_reset_is_for_all_ranks(open_ranks: Callable[[int], Served], tmp_path: Path) -> None:
    first = open_ranks(0)
    first.write([0, 1])
    first.disk.forget_all()
    assert first.read([0, 1]) == [False, False]
    assert NAMES[0] not in first.disk
    first.write([0])
    assert NAMES[0] in first.disk and len(list(tmp_path.glob("facet-*/*/*.blocks"))) == RANKS


def test_a_read_that_is_given_up_brings_nothing_more(open_ranks: Callable[[int], Served]) -> None:
    first = open_ranks(0)
    first.write(list(range(BLOCKS)))
    second = open_ranks(1)
    read = BlockRead(NAMES, range(BLOCKS))
    second.disk.read(read)
    second.disk.end(read, time.monotonic())
    before = [memory.copy() for memory in second.memories]
    time.sleep(0.05)
    assert all(np.array_equal(*each) for each in zip(before, second.memories, strict=True))


def test_a_rank_tells_that_it_has_written_when_it_has(tmp_path: Path) -> None:
    """A thread that tells something else while a write begins does not say that the write is over."""

    class TellsWhileCopying(BlockPieces):
        def copy(self, block: int, into: np.ndarray) -> None:
            other = Thread(target=store._tell, args=(None,))
            other.start()
            other.join(0.1)
            super().copy(block, into)

    told: list[tuple[int, int]] = []
    store = BlockStore(
        BlockFolder(tmp_path, "one", 1 << 30), TellsWhileCopying([np.zeros((BLOCKS, 64), np.uint8)])
    )
    rank = RankDisk(store, lambda news: told.append((news.written, len([*tmp_path.glob("*/*/*.blocks")]))))
    rank.obey(DiskOrder("write", "blocks", 0, NAMES[:1], [0]))
    while told[-1][0] != 1:
        time.sleep(0.001)
    store.close()
    assert all(files == 1 for written, files in told if written == 1)


def test_ranks_that_keep_blocks_in_memory_have_the_same_ones() -> None:
    """The second rank has less room, so what it has lost is lost for both."""
    memories = [torch.randint(0, 256, (BLOCKS, 64 + 8 * rank), dtype=torch.uint8) for rank in range(RANKS)]
    before = [memory.clone() for memory in memories]
    ranks: list[RankDisk] = []

    def order_all(order: DiskOrder) -> None:
        for rank in ranks:
            rank.obey(order)

    disk = RanksDisk(order_all, lambda _: time.sleep(0.001), RANKS)

    def open_rank(rank: int) -> HostStore:
        copies = make_copies([memories[rank]], 400, AtOnce(), AtOnce(), lambda _: lambda: None)
        assert copies is not None
        while copies.ready < copies.slots:
            time.sleep(0.001)
        return HostStore(copies)

    stores = [open_rank(rank) for rank in range(RANKS)]
    ranks += [RankDisk(store, partial(disk.hear, rank)) for rank, store in enumerate(stores)]
    assert disk.opened() is disk and (disk.room, disk.most) == (5, 5)
    disk.write(NAMES[:5], [*range(5)])
    assert disk.rest(30)
    disk.write(NAMES[5:6], [5])
    assert disk.rest(30)
    assert [name in disk for name in NAMES[:7]] == [False, *[True] * 5, False]
    for memory in memories:
        memory.zero_()
    read = BlockRead([NAMES[3], NAMES[5], NAMES[0]], [6, 7, 8])
    disk.read(read)
    disk.wait_for(read, 30)
    disk.end(read, time.monotonic())
    assert read.loaded == [True, True, False]
    assert all(torch.equal(one[6:8], old[[3, 5]]) for one, old in zip(memories, before, strict=True))
    assert (disk.totals.written, disk.totals.read) == (6, 2)
    for store in stores:
        store.close()


def test_ranks_that_differ_keep_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = RanksDisk(lambda _: None, lambda _: None, RANKS)
    assert disk.opened() is None and not caplog.text, "nobody has asked for it"
    store = BlockStore(BlockFolder(tmp_path, "one", 1 << 30), BlockPieces([np.zeros((BLOCKS, 64), np.uint8)]))
    RankDisk(store, lambda news: disk.hear(0, news))
    assert disk.opened() is None and "some ranks have nothing to keep" in caplog.text
    store.close()


TEXT = [5 + number * number % (VOCAB_SIZE - 5) for number in range(400)]


@pytest.mark.parametrize("cut", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_real_ranks_find_their_prefixes_again(tmp_path: Path, cut: str) -> None:
    folder = tiny_checkpoint("LlamaForCausalLM", tmp_path / "llama", max_position_embeddings=512)
    sizes = {"device": "cpu", "cpu_threads": 1, "block_size": 16, "max_model_len": 512, cut: 2}
    kept = {"kv_cache_dir": str(tmp_path), "num_gpu_blocks_override": 100}
    config = engine_config(folder, **sizes, **kept, dtype="float32")
    results: list[Result] = []
    hits: list[int] = []

    def ask(engine: Engine) -> None:
        request = AddRequest(len(results), TEXT, Sampling(max_tokens=8, temperature=0, logprobs=3))
        results.extend(answers(engine, [request]).values())
        hits.append(engine.stats().prefix_hits)

    for _ in range(2):
        engine = Engine.start(config, lambda _: None)
        try:
            ask(engine)
            if hits[-1]:
                [path, _] = sorted(tmp_path.glob("facet-*/*/*.blocks"))
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
                engine._scheduler.cache.reset_prefixes()  # pyright: ignore[reportPrivateUsage]
                ask(engine)
                totals = engine.stats().disk
                assert totals is not None and totals.failures in (1, 2)
        finally:
            engine.stop()
    assert results[1] == results[0] and results[2] == results[0]
    # A thread that finds the damage removes the file, perhaps before the other one has opened it.
    assert hits[:2] == [0, 384] and 384 <= hits[2] < 2 * 384
