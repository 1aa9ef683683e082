"""The scheduler with a worker whose text shows every wrong block, slot, offset and step."""

from __future__ import annotations

import pytest
from fake_worker import FakeWorker, facts, reference
from scheduler_bench import Bench, add, config

from engine_core.engine_stats import Timing
from engine_core.features.installed import make_scheduler
from engine_core.protocol import Failed, Pooled, Tokens


def test_a_prompt_is_read_in_chunks_after_the_tokens_of_others() -> None:
    bench = Bench(config(), facts(max_num_batched_tokens=8))
    bench.add(add(1, [1, 2, 3], max_tokens=9))
    bench.step()
    bench.add(add(2, list(range(1, 21)), max_tokens=1))
    rows = bench.all_rows()
    assert rows[:4] == [[1, 7], [1, 7], [1, 6], [1]]
    assert bench.text(2) == reference(list(range(1, 21)), 1)


def test_long_prefill_threshold_holds_only_beside_others() -> None:
    bench = Bench(config(long_prefill_token_threshold=4), facts())
    bench.add(add(1, list(range(1, 13)), max_tokens=6))
    bench.step()
    assert bench.rows == [12]
    bench.add(add(2, list(range(20, 32)), max_tokens=1))
    bench.step()
    assert bench.rows == [1, 4]


def test_without_chunks_a_prompt_waits_until_it_fits_whole() -> None:
    limits = facts(max_num_batched_tokens=16, max_model_len=16)
    bench = Bench(config(enable_chunked_prefill=False), limits)
    bench.add(add(1, [1] * 10, max_tokens=1))
    bench.add(add(2, [2] * 10, max_tokens=1))
    bench.step()
    assert bench.rows == [10]
    bench.step()
    assert bench.rows == [10]


def test_without_chunks_the_budget_must_hold_any_prompt() -> None:
    with pytest.raises(
        ValueError, match=r"--max-num-batched-tokens .*8.* to at least --max-model-len \(128\)"
    ):
        make_scheduler(config(enable_chunked_prefill=False), facts(max_num_batched_tokens=8), vocab_size=50)


def test_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'random'; it can be fcfs or priority"):
        make_scheduler(config(scheduling_policy="random"), facts(), vocab_size=50)


def test_equal_beginnings_are_computed_once() -> None:
    bench = Bench(config(), facts(block_size=4))
    prompt = list(range(1, 13))
    bench.serve(add(1, prompt, max_tokens=1))
    bench.add(add(2, prompt, max_tokens=1))
    bench.add(add(3, prompt, max_tokens=1, salt="mine"))
    bench.serve(add(4, prompt, max_tokens=1, prompt_logprobs=0))
    assert [bench.cached(id) for id in (1, 2, 3, 4)] == [0, 8, 0, 0]
    assert bench.scheduler.counters.prefix_hits == 8


def test_a_higher_priority_takes_the_row_of_a_lower_one_that_runs() -> None:
    for depth in (0, 1, 2):
        bench = Bench(config(scheduling_policy="priority"), facts(max_num_seqs=1), depth=depth)
        bench.add(add(1, [1, 2, 3], max_tokens=30, priority=5))
        bench.steps(4)
        bench.add(add(2, [4, 5, 6], max_tokens=2, priority=0))
        bench.add(add(3, [7, 8], max_tokens=2, priority=5))
        ended = []
        while bench.step():
            ended += [
                id
                for id in (1, 2, 3)
                if id not in ended and (0, id) in bench.outputs and bench.last(id).finish
            ]
        assert ended == [2, 1, 3]
        assert bench.text(1) == reference([1, 2, 3], 30)
        assert bench.preemptions(1) == 1


def test_priorities_mean_nothing_under_fcfs() -> None:
    bench = Bench(config(), facts(max_num_seqs=1))
    bench.add(add(1, [1], max_tokens=5, priority=9))
    bench.step()
    bench.serve(add(2, [2], max_tokens=1, priority=0))
    assert bench.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_newer_one_never_takes_blocks_of_an_older_one(length: int) -> None:
    """The older one may also stand still, because nothing in flight can be preempted for it."""
    bench = Bench(config(), facts(block_size=4, num_blocks=8, max_model_len=32), depth=1)
    bench.add(add(1, [1, 2, 3, 4], max_tokens=26))
    bench.serve(add(2, [5] * length, max_tokens=26))
    assert [bench.preemptions(id) for id in (1, 2)] == [0, 1]
    assert bench.text(2) == reference([5] * length, 26)


def test_no_row_is_wasted_where_the_end_is_known_beforehand() -> None:
    for depth in (0, 1, 2):
        bench = Bench(config(), facts(), depth=depth)
        bench.serve(add(1, [1, 2, 3], max_tokens=4))
        assert bench.scheduler.counters.step_tokens == 3 + 3


def test_length_ends_at_max_model_len() -> None:
    bench = Bench(config(), facts(max_model_len=16))
    bench.add(add(1, [1] * 15, max_tokens=100))
    bench.serve(add(2, [1] * 10, max_tokens=100))
    assert bench.text(1) == reference([1] * 15, 1)
    assert bench.text(2) == reference([1] * 10, 6)
    assert [bench.last(id).finish for id in (1, 2)] == ["length", "length"]


def test_stop_wins_over_length_and_waits_for_min_tokens() -> None:
    text = reference([3, 1], 6)
    stop = text[2]
    assert stop not in text[:2]
    bench = Bench(config(), facts(), depth=1)
    bench.add(add(1, [3, 1], max_tokens=3, stop_token_ids=(stop,)))
    bench.add(add(2, [3, 1], max_tokens=6, stop_token_ids=(stop,), min_tokens=2))
    bench.serve(add(3, [3, 1], max_tokens=4, stop_token_ids=(stop,), min_tokens=3))
    assert [bench.text(id) for id in (1, 2, 3)] == [text[:3], text[:3], text[:4]]
    assert [bench.last(id).finish for id in (1, 2, 3)] == ["stop", "stop", "length"]


def test_a_full_queue_refuses_with_503_but_free_rows_are_no_queue() -> None:
    bench = Bench(config(max_num_queued_reqs=1), facts(max_num_seqs=2))
    bench.add_all(add(id, [id], max_tokens=2) for id in range(1, 5))
    refused = bench.outputs.pop((0, 4))
    assert [output.code for output in refused if isinstance(output, Failed)] == [503]
    bench.run()
    assert sorted(bench.outputs) == [(0, 1), (0, 2), (0, 3)]


def test_the_same_id_of_two_servers_is_two_requests() -> None:
    bench = Bench(config(), facts())
    bench.add(add(1, [1, 2], max_tokens=3), client=0)
    bench.add(add(1, [3, 4], max_tokens=3), client=1)
    bench.add(add(1, [5, 6], max_tokens=3), client=1)
    refused = bench.outputs.pop((1, 1))
    assert [output.code for output in refused if isinstance(output, Failed)] == [400]
    bench.run()
    assert bench.text(1, client=0) == reference([1, 2], 3)
    assert bench.text(1, client=1) == reference([3, 4], 3)


def test_timing_is_of_the_clock_that_was_passed_in() -> None:
    scheduler = make_scheduler(config(), facts(), vocab_size=50)
    worker = FakeWorker(facts())
    scheduler.add(0, add(1, [1, 2], max_tokens=2), now=10.0)
    told: list[Tokens | Pooled | Failed] = []
    for planned, landed in ((11.0, 13.0), (14.0, 18.0)):
        plan = scheduler.schedule(planned)
        assert plan is not None
        told += scheduler.results.land(plan, worker.launch(plan.step).result(), landed)[0]
    first, last = told
    assert isinstance(first, Tokens) and first.timing is None
    assert isinstance(last, Tokens) and last.timing == Timing(
        queued=1, prefill=2, decode=5, preemptions=0, steps=2, compute=6
    )


def test_a_large_prompt_is_not_passed_over_for_ever_by_a_stream_of_small_ones() -> None:
    bench = Bench(config(), facts(block_size=4, num_blocks=16, max_num_seqs=4, max_model_len=64), depth=1)
    bench.add_all(add(id, [id] * 4, max_tokens=8) for id in range(1, 4))
    bench.step()
    bench.add(add(99, [9] * 60, max_tokens=2))  # needs the whole cache
    for id in range(100, 140):  # one more small request for each step
        bench.add(add(id, [id - 99] * 4, max_tokens=8))
        bench.step()
    assert bench.text(99) == reference([9] * 60, 2)
    assert bench.preemptions(99) == 0
