"""Blocks of layers with windows: how many a sequence holds, and which prefixes are found."""

from __future__ import annotations

import pytest
from fake_worker import facts, reference
from scheduler_bench import Bench, add, config

from engine_core.features.installed import make_scheduler
from worker.protocol import StepOutput

TOKENS = [1 + number * number % 47 for number in range(60)]
OTHERS = [1 + number % 7 for number in range(60)]


def bench(windows: tuple[int, ...] = (0, 8), blocks: int = 30, step: int = 8) -> Bench:
    limits = {"num_blocks": blocks, "max_num_batched_tokens": step}
    return Bench(config(), facts(**limits, windows=windows, tasks=("generate",)), depth=0)


def held(bench: Bench, id: int = 1) -> list[int]:
    """The blocks of a sequence in each group."""
    [seq] = [seq for seq in bench.scheduler.running if seq.id == id]
    return [sum(block != bench.facts.num_blocks for block in table) for table in seq.tables]


def test_blocks_behind_the_window_are_given_back() -> None:
    served = bench()
    served.add(add(1, TOKENS[:6], max_tokens=40))
    seen = []
    while served.step():
        if served.scheduler.running:
            seen.append(held(served))
    assert max(seen) == [11, 3] and [3, 3] in seen
    assert served.text(1) == reference(TOKENS[:6], 40)


@pytest.mark.parametrize("windows", [(8,), (0, 8), (0, 8, 8, 20)])
def test_a_prefix_ends_where_windows_have_their_last_blocks(windows: tuple[int, ...]) -> None:
    served = bench(windows, blocks=100)
    served.serve(add(1, TOKENS[:40]))
    served.serve(add(2, TOKENS[:38]))
    assert served.cached(2) == 36
    served.serve(add(3, [*TOKENS[:18], 3]))
    assert served.cached(3) == 16, "given back, but not taken yet"


def test_a_middle_whose_window_is_taken_is_not_found() -> None:
    served = bench()
    served.serve(add(1, TOKENS[:40], max_tokens=1))
    served.serve(add(2, OTHERS[:40], max_tokens=1))
    served.serve(add(3, [*TOKENS[:22], 3], max_tokens=1))
    assert served.cached(3) == 0
    served = bench()
    served.serve(add(1, TOKENS[:40], max_tokens=1))
    served.serve(add(2, OTHERS[:40], max_tokens=1))
    served.serve(add(3, TOKENS[:40], max_tokens=1))
    assert served.cached(3) == 32, "what was held until the end is evicted last"


@pytest.mark.parametrize("windows", [(0,), (0, 8), (0, 8, 8, 20)])
def test_a_beginning_that_prompts_share_is_computed_once_up_to_its_last_token(
    windows: tuple[int, ...],
) -> None:
    served = bench(windows, blocks=100)
    served.serve(add(1, [*TOKENS[:21], 7, 8], shared=(21,)))
    served.add_all([add(id, [*TOKENS[:21], id, id], shared=(21,)) for id in (2, 3, 4)])
    served.run()
    served.serve(add(5, [*TOKENS[:21], 3, 3, *served.text(3)]))
    assert [served.cached(id) for id in (2, 3, 4, 5)] == [21, 21, 21, 24]
    for id in (2, 3, 4):
        assert served.text(id) == reference([*TOKENS[:21], id, id], 4)


def test_the_end_of_a_beginning_is_forgotten_with_its_block() -> None:
    served = bench((0,), blocks=12)
    served.serve(add(1, TOKENS[:7], shared=(5,)))
    served.serve(add(2, OTHERS[:44]))
    served.serve(add(3, [*TOKENS[:5], 3], shared=(5,)))
    assert served.cached(3) == 0 and served.text(3) == reference([*TOKENS[:5], 3], 4)


def test_prompts_wait_for_what_they_need_and_no_longer() -> None:
    """Each of two prompts of 40 tokens needs ten blocks and those of the window, and not twenty."""
    served = bench(blocks=28, step=4)
    served.add_all([add(1, TOKENS[:40]), add(2, OTHERS[:40])])
    served.steps(12)
    assert [seq.id for seq in served.scheduler.running] == [1, 2]
    served.run()
    assert not served.scheduler.counters.preemptions


def test_memory_of_five_windows_to_one_full_layer() -> None:
    """32 requests of 8,192 tokens need less than 0.35 of what they would without windows."""
    full, windowed = peak((0,) * 6), peak((0, *[1024 + 63] * 5))
    assert full > 0.98 * REQUESTS * LONGEST / 16 * 6, "all are there at the same time"
    assert windowed <= 0.35 * full


REQUESTS, LONGEST, ANSWER = 32, 8192, 200


def peak(windows: tuple[int, ...]) -> int:
    """The most blocks in use while all requests grow to the greatest length."""
    limits = {"block_size": 16, "max_num_seqs": REQUESTS, "max_num_batched_tokens": 2048}
    found = facts(num_blocks=100_000, max_model_len=LONGEST, windows=windows, **limits)
    scheduler = make_scheduler(config(), found, vocab_size=50)
    for id in range(REQUESTS):
        prompt = [(id + at) % 50 for at in range(LONGEST - ANSWER)]
        scheduler.add(0, add(id, prompt, max_tokens=ANSWER), 0.0)
    most = 0
    while (plan := scheduler.schedule(0.0)) is not None:
        most = max(most, found.num_blocks - scheduler.cache.pool.free)
        output = StepOutput(plan.step.number, [7] * len(plan.seqs), [], {})
        scheduler.results.land(plan, output, 0.0)
    assert not scheduler.live
    return most
