"""Prompts that are much shorter than the one before them do not wait until all of it is read."""

import pytest
from scheduler_bench import add
from scripted_clock import Clock

from engine_core.protocol import Tokens


@pytest.mark.parametrize(("gap_ms", "read"), [(None, 500), (0, 1598)])
def test_a_much_shorter_prompt_overtakes_a_long_one(gap_ms: float | None, read: int) -> None:
    """It gets half of each step, so that the long one is read on."""
    clock = Clock(gap_ms=gap_ms)
    clock.add(add(1, [1] * 4000, max_tokens=1))
    clock.add(add(2, [2] * 450, max_tokens=1))
    at = clock.now
    while 2 not in clock.outputs:
        clock.step()
    ended, first = clock.outputs[2][0]
    assert clock.scheduler.live[0, 1].computed == pytest.approx(read, rel=0.1)
    assert isinstance(first, Tokens) and first.expected == pytest.approx(ended - at, rel=0.3)


def test_a_prompt_of_about_the_same_length_waits_for_the_one_before_it() -> None:
    clock = Clock(gap_ms=None)
    clock.add(add(1, [1] * 3000, max_tokens=1))
    clock.step()
    clock.add(add(2, [2] * 1500, max_tokens=1))
    while 2 not in clock.outputs:
        clock.step()
    assert clock.outputs[1][0][0] < clock.outputs[2][0][0]


def test_overtaking_takes_no_slot_for_which_another_prompt_waits() -> None:
    clock = Clock(gap_ms=None, slots=2)
    clock.add(add(1, [1] * 4000, max_tokens=1))
    clock.step()
    clock.add(add(2, [2] * 3000, max_tokens=1))
    clock.add(add(3, [3] * 100, max_tokens=1))
    clock.step()
    assert 3 not in clock.outputs
    clock.run()
    assert clock.outputs[1][0][0] < clock.outputs[3][0][0] < clock.outputs[2][0][0]
