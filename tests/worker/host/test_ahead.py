"""Pages of a cache that are there before they are needed."""

from __future__ import annotations

import ctypes
import mmap
import platform
import time

import pytest
import torch
from torch import Tensor

from worker.host.ahead import Ahead
from worker.protocol import SeqStep, StepInput

BLOCKS, SHARE = 64, 1 << 20  # bytes of a block in each part

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="elsewhere nothing is made ahead")


def untouched() -> Tensor:
    """[BLOCKS + 1, SHARE], page by page."""
    pages = mmap.mmap(-1, (BLOCKS + 1) * SHARE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(BLOCKS + 1, SHARE)


def there(part: Tensor) -> list[int]:
    """Blocks all of whose pages are in memory."""
    count = SHARE // mmap.PAGESIZE
    found: list[int] = []
    for number, block in enumerate(part):
        told = (ctypes.c_ubyte * count)()
        address = ctypes.c_void_p(block.data_ptr())
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(SHARE), told) == 0
        if all(page & 1 for page in told):
            found.append(number)
    return found


def step(*blocks: int) -> StepInput:
    seq = SeqStep(slot=0, start=0, count=1, blocks=list(blocks), samples=False)
    return StepInput(number=1, new=[], seqs=[seq])


def wait_for(part: Tensor, blocks: range) -> None:
    deadline = time.monotonic() + 30
    while not set(blocks) <= set(there(part)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_eighth_of_the_cache_is_made_ahead_in_every_part() -> None:
    parts = [untouched(), untouched()]
    parts[0][3] = 7
    ahead = Ahead(parts, BLOCKS)
    ahead.follow(step(0, 1))
    ahead.follow(step(2))
    for part in parts:
        wait_for(part, range(2 + BLOCKS // 8))
        assert not set(there(part)) & set(range(BLOCKS // 2, BLOCKS + 1))
    assert bool((parts[0][3] == 7).all())
    ahead.follow(step(BLOCKS - 1))
    wait_for(parts[1], range(BLOCKS))
    assert there(parts[1]) == list(range(BLOCKS))
    ahead.close()


def test_as_much_is_made_before_the_first_step() -> None:
    part = untouched()
    ahead = Ahead([part], BLOCKS)
    ahead.begin()
    wait_for(part, range(BLOCKS // 8))
    assert there(part) == list(range(BLOCKS // 8))
    ahead.close()


def test_the_spare_block_and_steps_without_new_ones_ask_for_nothing() -> None:
    part = untouched()
    ahead = Ahead([part], BLOCKS)
    for each in (step(), step(BLOCKS), step(0)):
        ahead.follow(each)
    wait_for(part, range(BLOCKS // 8))
    assert not set(there(part)) & set(range(BLOCKS // 2, BLOCKS + 1))
    ahead.close()
