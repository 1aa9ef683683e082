"""What the outputs of `LLM` say about cached tokens and times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from facet import LLM, SamplingParams

LONG = "A prompt that nobody else sends: " + "one two three four five six seven eight " * 8


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", kv_cache_memory_bytes="64m", cpu_threads=1) as llm:
        yield llm


def test_answers_have_times(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    [output] = llm.generate(LONG, params, use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None
    assert metrics.queued_time == pytest.approx(metrics.scheduled_ts - metrics.queued_ts, abs=1e-6)
    assert metrics.prefill_time > 0 and metrics.decode_time > 0
    assert metrics.steps == 5 and metrics.compute_time > 0
    assert metrics.compute_time <= 1.1 * (metrics.prefill_time + metrics.decode_time)


def test_the_choices_of_a_prompt_add_to_its_cost(llm: LLM):
    params = SamplingParams(max_tokens=5, ignore_eos=True, n=2)
    [output] = llm.generate("Once upon a time", params, use_tqdm=False)
    assert output.metrics is not None and output.metrics.steps == 10


def test_vectors_and_scores_have_times_too(llm: LLM):
    [pooled], [embedded] = llm.encode(LONG, pooling_task="embed"), llm.embed(LONG)
    for output in (pooled, embedded):
        assert output.metrics is not None and output.metrics.prefill_time > 0
        assert output.metrics.queued_ts <= output.metrics.scheduled_ts
        assert output.metrics.steps == 1 and output.metrics.compute_time > 0
    assert embedded.num_cached_tokens == pooled.num_cached_tokens
    [score] = llm.score("a", "b")  # of the vectors of two texts
    assert score.metrics is None
