"""Answers that another engine has begun: what comes is what would have come, and nothing is told twice."""

from fake_worker import facts, reference
from msgspec.structs import replace
from scheduler_bench import Bench, add, config

from engine_core.protocol import AddRequest, Admitted, Failed
from worker.protocol import Sampling


def resumed(request: AddRequest, emitted: int, **changes: object) -> AddRequest:
    """The request after its first tokens have come from another engine."""
    params = request.params
    assert isinstance(params, Sampling)
    whole = reference(request.tokens, params.max_tokens, params.stop_token_ids, params.min_tokens)
    assert emitted < len(whole)
    tokens = request.tokens + whole[:emitted]
    return replace(request, tokens=tokens, prompt_len=len(request.tokens), **changes)


def test_the_model_s_length_ends_an_answer_where_it_would_have_ended() -> None:
    bench = Bench(config(), facts(max_model_len=16))
    bench.serve(resumed(add(1, [1, 2, 3], max_tokens=100), 5))
    assert bench.text(1) == reference([1, 2, 3], 13)[5:]
    assert bench.last(1).finish == "length"


def test_what_comes_with_the_first_token_is_not_told_again() -> None:
    prompt = list(range(1, 13))
    bench = Bench(config(), facts(block_size=4))
    bench.serve(add(1, prompt, max_tokens=1))
    bench.serve(resumed(add(2, prompt, max_tokens=4), 2))
    first = bench.outputs[0, 2][0]
    assert bench.text(2) == reference(prompt, 4)[2:]
    assert bench.cached(2) == 0 and getattr(first, "expected", 0) is None
    assert bench.scheduler.counters.prefix_queries == len(prompt), "it was looked up for the first one alone"


def test_nobody_is_told_that_it_waits() -> None:
    bench = Bench(config(), facts())
    new = replace(add(1, [3, 4], streams=True), sent=1.0)
    old = resumed(add(2, [5, 6], streams=True), 2, sent=1.0)
    assert isinstance(bench.scheduler.add(0, new, now=9.0), Admitted)
    assert bench.scheduler.add(0, old, now=9.0) is None
    bench.now = 10.0
    bench.run()


def test_an_answer_that_goes_on_comes_before_those_who_wait_for_a_first_token() -> None:
    bench = Bench(config(max_num_queued_reqs=1), facts(max_num_seqs=1))
    bench.add(add(1, [1], max_tokens=3))
    bench.step()
    bench.add(add(2, [2], max_tokens=3))
    bench.add(resumed(add(3, [3], max_tokens=3), 1))  # though the queue is full
    bench.serve(add(4, [4], max_tokens=3))
    assert [id for _, id in bench.outputs] == [1, 4, 3, 2], "4 is refused at once"
    assert isinstance(bench.outputs[0, 4][0], Failed)


def test_its_times_begin_where_it_began() -> None:
    bench = Bench(config(), facts())
    bench.now = 50.0
    bench.serve(resumed(add(1, [1, 2]), 2, sent=10.0, began=12.0))
    timing = bench.last(1).timing
    assert timing is not None and (timing.queued, timing.prefill) == (0.0, 2.0)
    assert timing.decode == bench.now - 13.0, "the last call of step had nothing to do"


def test_a_step_that_others_see_counts_it_as_decoding() -> None:
    bench = Bench(config(), facts())
    bench.add(resumed(add(1, [1, 2], streams=True), 2))
    assert (bench.scheduler.pace.decoding, bench.scheduler.pace.step_bound.readers) == (1, 1)
    bench.run()
    assert (bench.scheduler.pace.decoding, bench.scheduler.pace.step_bound.readers) == (0, 0)
