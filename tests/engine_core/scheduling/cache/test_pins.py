"""What a request has pinned stays in the cache before what others computed, and costs nobody anything."""

from __future__ import annotations

from fake_worker import facts, reference
from scheduler_bench import Bench, add, config

KEPT = [1 + number * number % 47 for number in range(33)]


def bench(**limits: int) -> Bench:
    sizes = {"block_size": 4, "num_blocks": 24, "max_model_len": 96, **limits}
    return Bench(config(), facts(**sizes), depth=1)


def cached(made: Bench, id: int, tokens: list[int], **options: object) -> int:
    """Serve a request, whose answer must be right; returns how many tokens of its prompt were cached."""
    made.serve(add(id, tokens, 1, **options))
    assert made.text(id) == reference(tokens, 1)
    return made.outputs[0, id][0].cached  # pyright: ignore[reportAttributeAccessIssue]


def test_a_pinned_prefix_outlives_others_and_what_comes_back_is_pinned_by_whom_asks() -> None:
    for pins in (False, True):
        made = bench()
        cached(made, 1, KEPT)
        assert cached(made, 2, KEPT, pins=pins) == 32
        for id in range(3, 9):
            cached(made, id, [id] * 60)
        assert cached(made, 10, KEPT) == (32 if pins else 0)


def test_nothing_waits_for_pinned_memory() -> None:
    made = bench()
    for id in range(4):
        cached(made, id, [20 + id] * 40, pins=True)
    assert cached(made, 9, [9] * 92) == 0, "it needs all blocks but one"
    assert not made.scheduler.counters.preemptions


def test_pinned_states_outlive_others() -> None:
    for pins, found in ((False, 0), (True, 8)):
        made = bench(remembered_states=4, num_blocks=200)
        first = [10, *range(21, 29)]
        cached(made, 1, first, pins=pins)
        for id in range(2, 8):
            cached(made, id, [10 + id, *range(21, 29)])
        assert cached(made, 9, [*first, 40]) == found
