"""Sequences whose readers do not keep up: they are in no step, and lose nothing but time."""

from __future__ import annotations

import pytest
from fake_worker import facts, reference
from scheduler_bench import Bench, add, config


def bench_of(**changes: int) -> Bench:
    return Bench(config(), facts(max_num_batched_tokens=64, max_model_len=48, **changes))


def test_a_paused_sequence_is_in_no_step_and_keeps_what_it_has() -> None:
    bench = bench_of()
    bench.add(add(1, [1, 2, 3], 20))
    bench.add(add(2, [4, 5, 6], 8))
    bench.step()
    bench.scheduler.paused.pause([(0, 1)])
    blocks = [*bench.scheduler.live[0, 1].tables[0]]
    while (0, 2) in bench.scheduler.live:
        bench.step()
        assert len(bench.rows) == 1
    assert not bench.step()  # nothing is left to do
    assert bench.scheduler.live[0, 1].tables == [blocks]
    assert len(bench.outputs[0, 1]) == 1
    bench.scheduler.paused.resume([(0, 1)])
    bench.run()
    assert bench.text(1) == reference([1, 2, 3], 20)
    assert bench.preemptions(1) == 0


@pytest.mark.parametrize("scarce", [{"max_num_seqs": 1}, {"num_blocks": 5, "block_size": 8}])
def test_others_take_its_slot_or_its_blocks_if_they_need_them(scarce: dict[str, int]) -> None:
    bench = bench_of(**scarce)
    bench.add(add(1, list(range(1, 20)), 10))
    bench.step()
    bench.scheduler.paused.pause([(0, 1)])
    bench.add(add(2, list(range(20, 39)), 10))
    while (0, 2) in bench.scheduler.live:
        assert bench.step()
    assert bench.text(2) == reference(list(range(20, 39)), 10)
    assert not bench.step()
    bench.scheduler.paused.resume([(0, 1)])
    bench.run()
    assert bench.text(1) == reference(list(range(1, 20)), 10)
    assert bench.preemptions(1) == 1


def test_a_running_sequence_that_grows_takes_them_too() -> None:
    bench = bench_of(num_blocks=6, block_size=8)
    bench.add(add(1, list(range(1, 17)), 24))
    bench.add(add(2, list(range(17, 33)), 9))
    bench.step()
    bench.scheduler.paused.pause([(0, 2)])
    while (0, 1) in bench.scheduler.live:
        assert bench.step()
    assert bench.preemptions(1) == 0
    bench.scheduler.paused.resume([(0, 2)])
    bench.run()
    assert bench.text(2) == reference(list(range(17, 33)), 9)


def test_one_that_waits_lets_others_pass() -> None:
    bench = bench_of(max_num_seqs=1)
    bench.add_all(add(id, [id], 5) for id in (1, 2, 3))
    bench.step()
    bench.scheduler.paused.pause([(0, 2), (0, 77)])
    while (0, 3) in bench.scheduler.live:
        assert bench.step()
    assert (0, 2) not in bench.outputs
    assert not bench.step()
    bench.scheduler.paused.resume([(0, 2), (0, 77)])
    bench.run()
    assert bench.text(2) == reference([2], 5)
