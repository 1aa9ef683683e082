"""The scheduler with sequences that are pooled, alone and beside those that generate."""

import pytest
from fake_worker import facts, reference, vectors_of
from scheduler_bench import Bench, add, config, pool

from engine_core.engine_stats import Timing
from engine_core.features.installed import make_scheduler
from worker.protocol import Pooling


def test_a_text_that_does_not_fit_beside_others_waits_for_the_next_step() -> None:
    limits = facts(max_num_batched_tokens=16, max_model_len=16, tasks=("embed",), causal=False)
    bench = Bench(config(), limits, depth=1)
    for id, length in enumerate((3, 16, 4, 4)):
        bench.add(pool(id, [1 + id] * length))
    rows = bench.all_rows()
    assert rows[:3] == [[3], [16], [4, 4]]


def test_a_text_is_cut_where_a_step_ends() -> None:
    bench = Bench(config(), facts(max_num_batched_tokens=16))
    for id, length in enumerate((10, 8, 20)):
        bench.add(pool(id, [1 + id] * length))
    rows = bench.all_rows()
    assert rows == [[10, 6], [2, 14], [6]]
    bench.add(add(7, [1, 2], max_tokens=9))
    bench.step()
    bench.add(pool(8, [9] * 16))
    bench.step()
    assert bench.rows == [1, 15]


def test_a_flood_of_texts_to_pool_delays_no_token_and_is_not_delayed_for_ever() -> None:
    bench = Bench(config(), facts(max_num_seqs=4, max_num_batched_tokens=8, num_blocks=64), depth=0)
    bench.add_all(add(id, [id], max_tokens=40) for id in (1, 2))
    bench.step()
    bench.add_all(pool(id, [3] * 20) for id in range(10, 50))
    pooled_tokens = 0
    for _ in range(39):
        bench.step()
        assert bench.rows[:2] == [1, 1]
        pooled_tokens += sum(bench.rows[2:])
    assert [len(bench.text(id)) for id in (1, 2)] == [40, 40]
    assert pooled_tokens > 39 * 4, "most of what the single tokens leave goes to texts"


def test_the_budget_of_an_encoder_must_hold_any_text() -> None:
    limits = facts(max_num_batched_tokens=8, max_model_len=16, tasks=("embed",), causal=False)
    with pytest.raises(ValueError, match=r"--max-num-batched-tokens .*8.* to at least --max-model-len"):
        make_scheduler(config(), limits, vocab_size=50)


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_a_generated_text_serves_a_pooled_one_and_the_other_way_round(task: str) -> None:
    bench = Bench(config(), facts(block_size=4, max_num_batched_tokens=5))
    prompt = list(range(1, 13))
    bench.serve(add(1, prompt, max_tokens=1))
    bench.serve(pool(2, prompt, task))
    bench.serve(add(3, [*prompt, 7], max_tokens=2))
    assert bench.pooled(2).cached == 8
    assert bench.pooled(2).vectors == vectors_of(
        prompt, Pooling(task="embed" if task == "embed" else "token_embed")
    )
    assert bench.cached(3) == 12
    assert bench.text(3) == reference([*prompt, 7], 2)


def test_hidden_states_of_cached_beginnings_are_bounded_in_a_step() -> None:
    """Each costs one token of the budget, and 13 hidden states; 32 may be pooled together."""
    for task, expected in (("token_embed", [[1, 1], [1, 1], [1]]), ("embed", [[1] * 5])):
        bench = Bench(config(), facts(block_size=4, max_num_batched_tokens=32, max_model_len=32))
        prompt = [7] * 13
        bench.serve(pool(0, prompt, task))
        bench.add_all(pool(id, prompt, task) for id in range(1, 6))
        rows = bench.all_rows()
        assert rows == expected
        assert [bench.pooled(id).cached for id in range(1, 6)] == [12] * 5


def test_timing_of_a_pooled_sequence_has_no_decode() -> None:
    bench = Bench(config(), facts(max_num_batched_tokens=4))
    bench.serve(pool(1, [1] * 10))
    assert bench.pooled(1).timing == Timing(queued=1, prefill=2, decode=0, preemptions=0, steps=3)
