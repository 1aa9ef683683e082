"""`LLMEngine`: requests that come and go while a program steps, and what it says of each."""

# pyright: reportPrivateUsage=false
from collections.abc import Iterator

import pytest

from engine_core.protocol import Failed
from facet import (
    LLM,
    BadRequest,
    Counter,
    EngineArgs,
    Histogram,
    LLMEngine,
    PoolingParams,
    PoolingRequestOutput,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)

CAPITAL = "The capital of France is"
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded() -> Iterator[LLMEngine]:
    args = EngineArgs("demo", dtype="float32", kv_cache_memory_bytes="64m", cpu_threads=1)
    engine = LLMEngine.from_engine_args(args)
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(loaded: LLMEngine) -> Iterator[LLMEngine]:
    yield loaded
    assert not loaded.has_unfinished_requests()


def run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """The outputs of each request until none is left."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def test_outputs_grow_until_they_are_finished(engine: LLMEngine):
    engine.add_request("a", CAPITAL, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert engine.get_num_unfinished_requests() == 1
    outputs = run(engine)["a"]
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(set(lengths)) and lengths[-1] == 8
    texts = [output.outputs[0].text for output in outputs]
    assert "Paris" in texts[-1] and all(texts[-1].startswith(text) for text in texts)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs[0].finish_reason == "length" and outputs[-1].prompt == CAPITAL


def test_metrics_tell_of_what_was_done(engine: LLMEngine):
    before, after = ({}, {})
    for found in (before, after):
        found.update({metric.name: metric for metric in engine.get_metrics()})
        engine.add_request("a", CAPITAL, SamplingParams(max_tokens=3, ignore_eos=True))
        run(engine)
    tokens, lengths = after["vllm:generation_tokens"], after["vllm:request_generation_tokens"]
    assert isinstance(tokens, Counter) and tokens.value == before["vllm:generation_tokens"].value + 3
    assert after["vllm:num_requests_running"].value == 0
    assert isinstance(lengths, Histogram) and lengths.count == lengths.buckets["+Inf"]


def test_requests_join_while_others_run(engine: LLMEngine):
    engine.add_request("first", CAPITAL, LONG)
    engine.step()
    final = SamplingParams(temperature=0, max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request("second", {"prompt": CAPITAL}, final)
    outputs = run(engine)
    assert len(outputs["first"]) > len(outputs["second"]) == 1
    begun, short = outputs["first"][-1].outputs[0], outputs["second"][0].outputs[0]
    assert begun.token_ids[: len(short.token_ids)] == short.token_ids


def test_deltas_add_up(engine: LLMEngine):
    params = SamplingParams(n=3, temperature=1, seed=3, max_tokens=9, logprobs=1, ignore_eos=True)
    engine.add_request("whole", "Once upon", params)
    whole = run(engine)["whole"][-1]
    params.output_kind = RequestOutputKind.DELTA
    engine.add_request("parts", "Once upon", params)
    parts = [part for output in run(engine)["parts"] for part in output.outputs]
    for expected in whole.outputs:
        mine = [part for part in parts if part.index == expected.index]
        assert "".join(part.text for part in mine) == expected.text
        assert [id for part in mine for id in part.token_ids] == expected.token_ids
        assert [one for part in mine for one in part.logprobs or []] == expected.logprobs
        assert mine[-1].cumulative_logprob == expected.cumulative_logprob


def test_an_interval_gathers_tokens(engine: LLMEngine):
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, stream_interval=4)
    engine.add_request("a", CAPITAL, params)
    assert [len(output.outputs[0].token_ids) for output in run(engine)["a"]] == [1, 5, 9]


def test_vectors_beside_text(engine: LLMEngine):
    engine.add_request("text", CAPITAL, SamplingParams(temperature=0, max_tokens=3))
    engine.add_request("vector", CAPITAL, PoolingParams(task="embed"))
    outputs: dict[str, object] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    vector = outputs["vector"]
    assert isinstance(vector, PoolingRequestOutput)
    assert vector.outputs.data.ndim == 1 and vector.prompt_token_ids == engine.tokenizer.encode(CAPITAL)
    vector.outputs.data[0] = 1.0  # it is the program's own array
    assert isinstance(outputs["text"], RequestOutput)


def test_an_ended_request_says_nothing_more_and_is_freed(engine: LLMEngine):
    for name in ("a", "b", "c"):
        engine.add_request(name, CAPITAL, LONG)
    engine.step()
    engine.abort_request(["a", "unknown"])
    engine.abort_request("c")
    assert engine.get_num_unfinished_requests() == 1
    assert set(run(engine)) == {"b"}
    assert engine.local.engine.stats().running == 0
    engine.add_request("a", CAPITAL, SamplingParams(max_tokens=1))  # the id can be used again
    assert set(run(engine)) == {"a"}


def test_one_failure_is_one_requests_failure(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch):
    link = engine.local.engine
    first, added = link.add, list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(link, "add", lambda client, add: (added.append(add.id), first(client, add)))
        engine.add_request("fails", CAPITAL, SamplingParams(n=2, temperature=1, max_tokens=5))
        engine.add_request("pooled", CAPITAL, PoolingParams(task="embed"))
        engine.add_request("lives", CAPITAL, SamplingParams(temperature=0, max_tokens=5))
    with monkeypatch.context() as patch:
        failures = [
            Failed(id=added[0], code=500, message="broken"),
            Failed(id=added[2], code=503, message="no"),
        ]
        patch.setattr(link, "step", lambda: {0: failures})
        outputs = {output.request_id: output for output in engine.step()}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    failed, refused, lives = (outputs[name] for name in ("fails", "pooled", "lives"))
    assert isinstance(failed, RequestOutput) and failed.finished and str(failed.error) == "broken"
    assert [output.finish_reason for output in failed.outputs] == ["error", "error"]
    assert str(refused.error) == "no" and lives.finished and lives.error is None


def test_refused_requests(engine: LLMEngine):
    with pytest.raises(BadRequest, match="temperature"):
        engine.add_request("a", "b", SamplingParams(temperature=5))
    with pytest.raises(BadRequest, match="'classify'"):
        engine.add_request("a", "b", PoolingParams(task="classify"))
    with pytest.raises(TypeError, match="answers need SamplingParams, not dict"):
        engine.add_request("a", "b", {})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="lora_request is a LoRARequest"):
        engine.add_request("a", "b", LONG, lora_request=object())  # pyright: ignore[reportArgumentType]
    assert not engine.has_unfinished_requests()
    engine.add_request("a", "b", LONG, arrival_time=None)
    with pytest.raises(ValueError, match="a request with the id 'a' is not finished yet"):
        engine.add_request("a", "b", LONG)
    engine.abort_request("a")


def test_priority_decides_who_runs_first():
    options = {"dtype": "float32", "kv_cache_memory_bytes": "64m", "cpu_threads": 1}
    engine = LLMEngine("demo", max_num_seqs=1, scheduling_policy="priority", **options)
    # The engine runs while a request is added: the first one has the only place until all are there.
    for name, priority, length in (("first", -1, 64), ("last", 5, 2), ("middle", 0, 2)):
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        engine.add_request(name, CAPITAL, params, priority=priority)
    ended: list[str] = []
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
    engine.shutdown()
    assert ended == ["first", "middle", "last"]


def test_the_option_seed_decides_what_is_drawn_in_each_run():
    params, prompts = SamplingParams(temperature=2, top_p=1, max_tokens=8), ["Once upon a time"] * 3
    options = {"dtype": "float32", "kv_cache_memory_bytes": "64m", "cpu_threads": 1}

    def draws(own: LLM) -> list[str]:
        return [output.outputs[0].text for output in own.generate(prompts, params, use_tqdm=False)]

    with LLM("demo", seed=1, **options) as one, LLM("demo", seed=1, **options) as two:
        first, second = draws(one), draws(one)
        assert [draws(two), draws(two)] == [first, second]
    assert len({*first, *second}) == 6
