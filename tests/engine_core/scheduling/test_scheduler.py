"""The scheduler with a worker whose text shows every wrong block, slot, offset and step."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from fake_worker import EOS, FakeWorker, facts, reference, vectors_of
from msgspec.structs import replace
from scheduler_bench import Bench, add, config, pool

from engine_core.protocol import Add, Failed, Pooled, Timing, Tokens
from engine_core.scheduling.scheduler import Scheduler
from worker.protocol import QUERY_GONE, Pooling, Sampling, StepOutput

# Random traces.


def random_bench(rnd: random.Random) -> tuple[Bench, list[tuple[int, Add]]]:
    """A configuration, and requests that share prefixes, salts and a tiny alphabet."""
    block_size = rnd.choice([1, 2, 4, 8])
    blocks = -(-45 // block_size) + rnd.choice([0, 2, 20])
    chunked = rnd.random() < 0.8
    limits = facts(
        block_size=block_size,
        num_blocks=blocks,
        max_num_seqs=rnd.choice([1, 2, 4, 8]),
        max_num_batched_tokens=rnd.choice([3, 8, 64]) if chunked else 64,
        max_model_len=48,
    )
    chosen = config(
        enable_prefix_caching=rnd.random() < 0.8,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=rnd.choice([0, 0, 2, 5]),
        scheduling_policy=rnd.choice(["fcfs", "priority"]),
        pipeline_parallel_size=rnd.choice([1, 1, 1, 2, 3, 4]),
        steps_ahead=rnd.choice([0, 1, 1, 2]),
    )
    top = rnd.choice([2, 49])  # a tiny alphabet makes equal blocks after different prefixes common
    shared = [rnd.randint(1, top) for _ in range(16)]
    requests = []
    for id in range(14):
        own = [rnd.randint(1, top) for _ in range(rnd.randint(1, 14))]
        max_tokens = rnd.choice([rnd.randint(1, 12), 100])
        tokens = shared[: rnd.randint(0, 16)] + own
        priority, salt = rnd.randint(0, 2), rnd.choice(["", "", "a"])
        if rnd.random() < 0.3:
            task = rnd.choice(["embed", "token_embed"])
            requests.append((rnd.randint(0, 1), pool(id, tokens, task, priority=priority, salt=salt)))
            continue
        if len(tokens) + max_tokens > 45:
            max_tokens = 45 - len(tokens)
        request = add(
            id,
            tokens,
            max_tokens,
            priority=priority,
            salt=salt,
            min_tokens=min(max_tokens, rnd.choice([0, 0, 5])),
            stop_token_ids=rnd.choice([(), (EOS,), tuple(range(5))]),
            prompt_logprobs=rnd.choice([None, None, 0]),
        )
        requests.append((rnd.randint(0, 1), request))
    return Bench(chosen, limits, depth=chosen.depth - 1), requests


@pytest.mark.parametrize("part", range(5))
def test_random_traces_equal_the_reference(part: int) -> None:
    seen = Counter()
    for seed in range(part * 250, (part + 1) * 250):
        rnd = random.Random(seed)
        bench, requests = random_bench(rnd)
        todo, aborted = deque(requests), set()
        aborts = rnd.random() < 0.5
        while todo or bench.scheduler.live or bench.in_flight:
            if todo and rnd.random() < 0.7:
                client, request = todo.popleft()
                bench.add(request, client)
            if aborts and bench.scheduler.live and rnd.random() < 0.1:
                key = rnd.choice(sorted(bench.scheduler.live))
                aborted.add(key)
                bench.abort(key)
            assert bench.step() or todo or not bench.scheduler.live, f"stuck with seed {seed}"
        assert bench.scheduler.cache.pool.free == bench.facts.num_blocks
        for client, request in requests:
            params = request.params
            if isinstance(params, Pooling):
                check_pooled(bench, client, request, params, (client, request.id) in aborted)
                seen["pooled"] += 1
                continue
            expected = reference(request.tokens, params.max_tokens, params.stop_token_ids, params.min_tokens)
            text, last = bench.text(request.id, client), bench.last(request.id, client)
            if (client, request.id) in aborted:
                expected = expected[: len(text)]
                assert last.finish == "abort"
            assert text == expected, f"seed {seed}, request {request.id}"
            if text:
                check_first(bench.outputs[client, request.id][0], request)
        seen["preemptions"] += bench.scheduler.counters.preemptions
        seen["hits"] += bench.scheduler.counters.prefix_hits
        seen["aborted"] += len(aborted)
    counts = (seen["preemptions"], seen["hits"], seen["aborted"], seen["pooled"])
    assert min(counts) > 20, "the traces do not exercise enough"


def check_pooled(bench: Bench, client: int, request: Add, params: Pooling, aborted: bool) -> None:
    (only,) = bench.outputs[client, request.id]
    if aborted:
        assert isinstance(only, Failed) and only.code == 503
    else:
        assert isinstance(only, Pooled) and only.vectors == vectors_of(request.tokens, params)


def check_first(first: Tokens | Pooled | Failed, request: Add) -> None:
    assert isinstance(first, Tokens) and isinstance(request.params, Sampling)
    if request.params.prompt_logprobs is None:
        assert first.prompt_logprobs is None
    else:
        assert first.cached == 0
        assert [entry.ids for entry in first.prompt_logprobs or []] == [[t] for t in request.tokens[1:]]


# One rule at a time.


def test_a_prompt_is_read_in_chunks_after_the_tokens_of_others() -> None:
    bench = Bench(config(), facts(max_num_batched_tokens=8))
    bench.add(add(1, [1, 2, 3], max_tokens=9))
    bench.step()
    bench.add(add(2, list(range(1, 21)), max_tokens=1))
    rows = []
    while bench.step():
        rows.append(bench.rows)
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
        Scheduler(config(enable_chunked_prefill=False), facts(max_num_batched_tokens=8), vocab_size=50)


def test_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'random'; it can be fcfs or priority"):
        Scheduler(config(scheduling_policy="random"), facts(), vocab_size=50)


def test_equal_beginnings_are_computed_once() -> None:
    bench = Bench(config(), facts(block_size=4))
    prompt = list(range(1, 13))
    bench.add(add(1, prompt, max_tokens=1))
    bench.run()
    bench.add(add(2, prompt, max_tokens=1))
    bench.add(add(3, prompt, max_tokens=1, salt="mine"))
    bench.add(add(4, prompt, max_tokens=1, prompt_logprobs=0))
    bench.run()
    assert [bench.cached(id) for id in (1, 2, 3, 4)] == [0, 8, 0, 0]
    assert bench.scheduler.counters.prefix_hits == 8


def test_what_an_answer_leaves_in_the_cache_serves_the_next_turn() -> None:
    bench = Bench(config(), facts(block_size=4), depth=1)
    bench.add(add(1, [1, 2, 3], max_tokens=10))
    bench.run()
    turn = [1, 2, 3, *bench.text(1), 7, 8]
    bench.add(add(2, turn, max_tokens=2))
    bench.run()
    assert bench.cached(2) == 12
    assert bench.text(2) == reference(turn, 2)


def test_forgetting_the_cache_does_not_touch_what_runs() -> None:
    bench = Bench(config(), facts(block_size=2))
    bench.add(add(1, [1, 2, 3, 4, 5], max_tokens=6))
    bench.step()
    bench.scheduler.cache.pool.withdraw_all()
    bench.add(add(2, [1, 2, 3, 4, 5], max_tokens=6))
    bench.run()
    assert bench.text(1) == bench.text(2) == reference([1, 2, 3, 4, 5], 6)
    assert bench.cached(2) == 0


def test_a_higher_priority_takes_the_row_of_a_lower_one_that_runs() -> None:
    for depth in (0, 1, 2):
        bench = Bench(config(scheduling_policy="priority"), facts(max_num_seqs=1), depth=depth)
        bench.add(add(1, [1, 2, 3], max_tokens=30, priority=5))
        for _ in range(4):
            bench.step()
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
    bench.add(add(2, [2], max_tokens=1, priority=0))
    bench.run()
    assert bench.scheduler.counters.preemptions == 0


def test_a_full_cache_preempts_the_newest_and_everyone_still_ends() -> None:
    bench = Bench(config(), facts(block_size=2, num_blocks=14, max_model_len=24), depth=1)
    for id in range(1, 5):
        bench.add(add(id, [id] * 4, max_tokens=20))
    bench.run()
    assert bench.scheduler.counters.preemptions > 0
    assert bench.preemptions(1) == 0
    for id in range(1, 5):
        assert bench.text(id) == reference([id] * 4, 20)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_newer_one_never_takes_blocks_of_an_older_one(length: int) -> None:
    """The older one may also stand still, because nothing in flight can be preempted for it."""
    bench = Bench(config(), facts(block_size=4, num_blocks=8, max_model_len=32), depth=1)
    bench.add(add(1, [1, 2, 3, 4], max_tokens=26))
    bench.add(add(2, [5] * length, max_tokens=26))
    bench.run()
    assert [bench.preemptions(id) for id in (1, 2)] == [0, 1]
    assert bench.text(2) == reference([5] * length, 26)


def test_no_row_is_wasted_where_the_end_is_known_beforehand() -> None:
    for depth in (0, 1, 2):
        bench = Bench(config(), facts(), depth=depth)
        bench.add(add(1, [1, 2, 3], max_tokens=4))
        bench.run()
        assert bench.scheduler.counters.step_tokens == 3 + 3


def test_length_ends_at_max_model_len() -> None:
    bench = Bench(config(), facts(max_model_len=16))
    bench.add(add(1, [1] * 15, max_tokens=100))
    bench.add(add(2, [1] * 10, max_tokens=100))
    bench.run()
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
    bench.add(add(3, [3, 1], max_tokens=4, stop_token_ids=(stop,), min_tokens=3))
    bench.run()
    assert [bench.text(id) for id in (1, 2, 3)] == [text[:3], text[:3], text[:4]]
    assert [bench.last(id).finish for id in (1, 2, 3)] == ["stop", "stop", "length"]


def test_abort_in_every_state_gives_row_and_blocks_back_at_once() -> None:
    bench = Bench(config(), facts(max_num_seqs=2), depth=2)
    for id in (1, 2, 3):
        bench.add(add(id, [id, 7, 9], max_tokens=50))
    bench.step()
    bench.step()
    bench.abort((0, 1), (0, 3), (0, 99))
    bench.abort((0, 1))
    bench.add(add(4, [8, 8, 8], max_tokens=5))
    bench.run()
    for id in (1, 3):
        assert [output.finish for output in bench.outputs[0, id] if isinstance(output, Tokens)] == ["abort"]
    assert bench.text(4) == reference([8, 8, 8], 5)
    assert bench.text(2) == reference([2, 7, 9], 50)


def test_a_failed_row_ends_alone() -> None:
    bench = Bench(config(), facts())
    bench.add(add(1, [1, 2], max_tokens=3))
    bench.add(add(2, [3, 4], max_tokens=3))
    plan = bench.scheduler.schedule(0)
    assert plan is not None
    output = bench.worker.launch(plan.step).result()
    slot = plan.step.seqs[0].slot
    bench.collect(bench.scheduler.update(plan, replace(output, failed={slot: "non-finite"}), 0))
    bench.run()
    assert bench.outputs[0, 1] == [Failed(id=1, code=500, message="non-finite")]
    assert bench.text(2) == reference([3, 4], 3)


def test_a_failed_step_ends_all_of_its_sequences_and_no_other() -> None:
    bench = Bench(config(), facts(max_num_seqs=2))
    for id in (1, 2, 3):
        bench.add(add(id, [id], max_tokens=3))
    first, second = bench.scheduler.schedule(0), bench.scheduler.schedule(0)
    assert first is not None and second is not None
    bench.worker.launch(first.step)
    bench.collect(bench.scheduler.fail(first, "broken"))
    landed: StepOutput = bench.worker.launch(second.step).result()
    bench.collect(bench.scheduler.update(second, landed, 0))
    bench.run()
    assert [bench.outputs[0, id] for id in (1, 2)] == [[Failed(id, 500, "broken")] for id in (1, 2)]
    assert bench.text(3) == reference([3], 3)


def test_a_full_queue_refuses_with_503_but_free_rows_are_no_queue() -> None:
    bench = Bench(config(max_num_queued_reqs=1), facts(max_num_seqs=2))
    for id in range(1, 5):
        bench.add(add(id, [id], max_tokens=2))
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
    scheduler = Scheduler(config(), facts(), vocab_size=50)
    worker = FakeWorker(facts())
    scheduler.add(0, add(1, [1, 2], max_tokens=2), now=10.0)
    told: list[Tokens | Pooled | Failed] = []
    for planned, landed in ((11.0, 13.0), (14.0, 18.0)):
        plan = scheduler.schedule(planned)
        assert plan is not None
        told += scheduler.update(plan, worker.launch(plan.step).result(), landed)[0]
    first, last = told
    assert isinstance(first, Tokens) and first.timing is None
    assert isinstance(last, Tokens) and last.timing == Timing(queued=1, prefill=2, decode=5, preemptions=0)


def test_a_large_prompt_is_not_passed_over_for_ever_by_a_stream_of_small_ones() -> None:
    bench = Bench(config(), facts(block_size=4, num_blocks=16, max_num_seqs=4, max_model_len=64), depth=1)
    for id in range(1, 4):
        bench.add(add(id, [id] * 4, max_tokens=8))
    bench.step()
    bench.add(add(99, [9] * 60, max_tokens=2))  # needs the whole cache
    for id in range(100, 140):  # one more small request for each step
        bench.add(add(id, [id - 99] * 4, max_tokens=8))
        bench.step()
    assert bench.text(99) == reference([9] * 60, 2)
    assert bench.preemptions(99) == 0


def test_a_flood_of_texts_to_pool_delays_no_token_and_is_not_delayed_for_ever() -> None:
    bench = Bench(config(), facts(max_num_seqs=4, max_num_batched_tokens=8, num_blocks=64), depth=0)
    for id in (1, 2):
        bench.add(add(id, [id], max_tokens=40))
    bench.step()
    for id in range(10, 50):
        bench.add(pool(id, [3] * 20))
    pooled_tokens = 0
    for _ in range(39):
        bench.step()
        assert bench.rows[:2] == [1, 1]
        pooled_tokens += sum(bench.rows[2:])
    assert [len(bench.text(id)) for id in (1, 2)] == [40, 40]
    assert pooled_tokens > 39 * 4, "most of what the single tokens leave goes to texts"


# Pooled sequences.


@pytest.mark.parametrize("part", range(2))
def test_random_traces_of_whole_sequences(part: int) -> None:
    """An encoder has no cache and no chunks: each text is computed in one step, beside any others."""
    for seed in range(part * 200, (part + 1) * 200):
        rnd = random.Random(seed)
        chosen = config(
            scheduling_policy=rnd.choice(["fcfs", "priority"]),
            long_prefill_token_threshold=rnd.choice([0, 3]),
            enable_chunked_prefill=rnd.random() < 0.5,
        )
        limits = facts(
            max_num_seqs=rnd.choice([1, 3, 8]),
            max_num_batched_tokens=rnd.choice([24, 40]),
            max_model_len=24,
            tasks=("embed", "token_embed"),
            causal=False,
        )
        bench = Bench(chosen, limits, depth=rnd.choice([0, 1, 2]))
        todo = deque(
            pool(id, [rnd.randint(1, 49) for _ in range(rnd.choice([1, 5, 24]))], priority=rnd.randint(0, 2))
            for id in range(20)
        )
        requests = list(todo)
        while todo or bench.scheduler.live or bench.in_flight:
            if todo and rnd.random() < 0.8:
                bench.add(todo.popleft())
            assert bench.step() or todo or not bench.scheduler.live, f"stuck with seed {seed}"
        for request in requests:
            assert isinstance(request.params, Pooling)
            assert bench.pooled(request.id).vectors == vectors_of(request.tokens, request.params)
        assert bench.scheduler.stats().kv_usage == 0


def test_a_text_that_does_not_fit_beside_others_waits_for_the_next_step() -> None:
    limits = facts(max_num_batched_tokens=16, max_model_len=16, tasks=("embed",), causal=False)
    bench = Bench(config(), limits, depth=1)
    for id, length in enumerate((3, 16, 4, 4)):
        bench.add(pool(id, [1 + id] * length))
    rows = []
    while bench.step():
        rows.append(bench.rows)
    assert rows[:3] == [[3], [16], [4, 4]]


def test_a_text_is_not_cut_for_others_but_beside_single_tokens() -> None:
    bench = Bench(config(), facts(max_num_batched_tokens=16))
    for id, length in enumerate((10, 8, 20)):
        bench.add(pool(id, [1 + id] * length))
    rows = []
    while bench.step():
        rows.append(bench.rows)
    assert rows[:4] == [[10], [8], [16], [4]]
    bench.add(add(7, [1, 2], max_tokens=9))
    bench.step()
    bench.add(pool(8, [9] * 16))
    bench.step()
    assert bench.rows == [1, 15]


def test_the_budget_of_an_encoder_must_hold_any_text() -> None:
    limits = facts(max_num_batched_tokens=8, max_model_len=16, tasks=("embed",), causal=False)
    with pytest.raises(ValueError, match=r"--max-num-batched-tokens .*8.* to at least --max-model-len"):
        Scheduler(config(), limits, vocab_size=50)


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_a_generated_text_serves_a_pooled_one_and_the_other_way_round(task: str) -> None:
    bench = Bench(config(), facts(block_size=4, max_num_batched_tokens=5))
    prompt = list(range(1, 13))
    bench.add(add(1, prompt, max_tokens=1))
    bench.run()
    bench.add(pool(2, prompt, task))
    bench.run()
    bench.add(add(3, [*prompt, 7], max_tokens=2))
    bench.run()
    assert bench.pooled(2).cached == 8
    assert bench.pooled(2).vectors == vectors_of(
        prompt, Pooling(task="embed" if task == "embed" else "token_embed")
    )
    assert bench.cached(3) == 12
    assert bench.text(3) == reference([*prompt, 7], 2)


def test_a_pooled_prompt_may_fill_the_window() -> None:
    bench = Bench(config(), facts(max_model_len=16, num_blocks=4, block_size=4))
    bench.add(pool(1, [1] * 16))
    bench.run()
    assert bench.pooled(1).vectors == vectors_of([1] * 16, Pooling(task="embed"))


def test_a_preempted_pooled_sequence_is_read_again() -> None:
    for depth in (0, 1):
        limits = facts(max_num_seqs=1, max_num_batched_tokens=3)
        bench = Bench(config(scheduling_policy="priority"), limits, depth=depth)
        bench.add(pool(1, list(range(1, 20)), "token_embed", priority=5))
        bench.step()
        bench.step()
        bench.add(add(2, [4, 5], max_tokens=2, priority=0))
        bench.run()
        timing = bench.pooled(1).timing
        assert timing is not None and timing.preemptions == 1
        assert bench.pooled(1).vectors == vectors_of(list(range(1, 20)), Pooling(task="token_embed"))


def test_hidden_states_of_cached_beginnings_are_bounded_in_a_step() -> None:
    """Each costs one token of the budget, and 13 hidden states; 32 may be pooled together."""
    for task, expected in (("token_embed", [[1, 1], [1, 1], [1]]), ("embed", [[1] * 5])):
        bench = Bench(config(), facts(block_size=4, max_num_batched_tokens=32, max_model_len=32))
        prompt = [7] * 13
        bench.add(pool(0, prompt, task))
        bench.run()
        for id in range(1, 6):
            bench.add(pool(id, prompt, task))
        rows = []
        while bench.step():
            rows.append(bench.rows)
        assert rows == expected
        assert [bench.pooled(id).cached for id in range(1, 6)] == [12] * 5


def test_a_pooled_row_that_fails_ends_alone() -> None:
    bench = Bench(config(), facts())
    bench.add(pool(1, [1, 2], "token_embed", late_document="q"))
    bench.add(pool(2, [3, 4]))
    bench.add(add(3, [5, 6], max_tokens=2))
    bench.run()
    assert bench.outputs[0, 1] == [Failed(id=1, code=503, message=QUERY_GONE)]
    assert bench.pooled(2).vectors == vectors_of([3, 4], Pooling(task="embed"))
    assert bench.text(3) == reference([5, 6], 2)


def test_timing_of_a_pooled_sequence_has_no_decode() -> None:
    bench = Bench(config(), facts(max_num_batched_tokens=4))
    bench.add(pool(1, [1] * 10))
    bench.run()
    assert bench.pooled(1).timing == Timing(queued=1, prefill=2, decode=0, preemptions=0)
