"""`LLM` in this process, on the demo model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from facet import LLM, SamplingParams
from server.errors import BadRequest
from server.requests.pooling import PoolingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="float", kv_cache_memory_bytes="64M", cpu_threads="1", enforce_eager=True) as llm:
        yield llm


def test_one_answer_for_each_prompt_in_order(llm: LLM):
    prompts = ["The capital of France is", "The capital of Japan is", "Once upon a time"]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in together] == prompts
    assert "Paris" in together[0].outputs[0].text and "Tokyo" in together[1].outputs[0].text
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text for prompt in prompts]
    assert [output.outputs[0].text for output in together] == alone


def test_replicas_are_for_servers():
    with pytest.raises(ValueError, match="data_parallel_size: an LLM is one replica"):
        LLM("demo", data_parallel_size=2)


def test_token_ids_are_prompts_too(llm: LLM):
    ids = llm.tokenizer.encode("The capital of France is")
    (from_ids,) = llm.generate(ids, GREEDY, use_tqdm=False)
    assert from_ids.prompt is None and from_ids.prompt_token_ids == ids
    assert from_ids.outputs == llm.generate("The capital of France is", GREEDY, use_tqdm=False)[0].outputs


def test_chat(llm: LLM):
    (answer,) = llm.chat([{"role": "user", "content": "What is 3 plus 4?"}], GREEDY, use_tqdm=False)
    assert "7" in answer.outputs[0].text and answer.outputs[0].finish_reason == "stop"


def test_choices_stops_and_logprobs(llm: LLM):
    params = SamplingParams(
        n=3, seed=1, temperature=1.0, max_tokens=20, stop=["a"], logprobs=2, prompt_logprobs=1
    )
    (answer,) = llm.generate("Once upon", params, use_tqdm=False)
    assert [output.index for output in answer.outputs] == [0, 1, 2]
    for output in answer.outputs:
        assert "a" not in output.text
        assert len(output.logprobs) == len(output.token_ids)
        assert output.finish_reason == "length" or output.stop_reason in ("a", None)
    assert any(output.stop_reason == "a" for output in answer.outputs)
    assert answer.prompt_logprobs is not None
    assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids) - 1


def test_a_bad_request_runs_nothing_and_breaks_nothing(llm: LLM):
    with pytest.raises(BadRequest, match="temperature"):
        llm.generate(["a", "b"], [GREEDY, SamplingParams(temperature=3)], use_tqdm=False)
    with pytest.raises(ValueError, match="1 SamplingParams for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    assert llm.generate("The capital of France is", GREEDY, use_tqdm=False)[0].outputs[0].text


def test_vectors_from_the_model_that_generates(llm: LLM):
    texts = ["The capital of France is Paris.", "Bananas are yellow.", "What is the capital of France?"]
    outputs = llm.embed(texts, use_tqdm=False)
    vectors = np.array([output.outputs.embedding for output in outputs])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1)
    assert [output.prompt_token_ids for output in outputs] == [llm.tokenizer.encode(text) for text in texts]
    (alone,) = llm.embed(texts[1], use_tqdm=False)
    assert alone.outputs.embedding == pytest.approx(outputs[1].outputs.embedding, abs=1e-5)
    (raw,) = llm.encode(texts[0], PoolingParams(task="embed", use_activation=False), use_tqdm=False)
    length = np.linalg.norm(raw.outputs.data)
    assert length != pytest.approx(1, abs=0.1)
    assert raw.outputs.data / length == pytest.approx(vectors[0], abs=1e-5)
    scores = [output.outputs.score for output in llm.score(texts[2], texts, use_tqdm=False)]
    assert scores == pytest.approx(vectors @ vectors[2], abs=1e-5)


def test_texts_that_cannot_be_pooled(llm: LLM):
    with pytest.raises(BadRequest, match=r"'classify'\. It does: generate"):
        llm.classify("a", use_tqdm=False)
    with pytest.raises(BadRequest, match="'reward'"):
        llm.reward("a", use_tqdm=False)
    long = [5] * (llm.facts.max_text_len + 1)
    with pytest.raises(BadRequest, match="input 1 contains"):
        llm.embed(["a", long], use_tqdm=False)
    (cut,) = llm.embed(long, truncate_prompt_tokens=-1, use_tqdm=False)
    assert len(cut.prompt_token_ids) == llm.facts.max_text_len
    with pytest.raises(BadRequest, match="1:1, 1:N or N:N"):
        llm.score(["a", "b"], ["c"], use_tqdm=False)


def test_options_are_checked():
    with pytest.raises(ValueError, match="no option max_model_length; did you mean max_model_len"):
        LLM("demo", max_model_length=10)


@pytest.mark.parametrize("quantization", ["int8", "int8-dynamic", "int4"])
def test_quantized_models_generate_and_embed(llm: LLM, quantization: str):
    prompt = "The capital of France is"
    (expected,) = llm.embed(prompt, use_tqdm=False)
    options = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "cpu_threads": 1}
    with LLM("demo", quantization=quantization, **options) as small:
        (answer,) = small.generate(prompt, GREEDY, use_tqdm=False)
        assert "Paris" in answer.outputs[0].text
        (found,) = small.embed(prompt, use_tqdm=False)
    near = np.dot(found.outputs.embedding, expected.outputs.embedding)
    assert (0.97 if quantization == "int4" else 0.999) < near < 1 - 1e-7


def test_quantization_must_be_known():
    with pytest.raises(ValueError, match="quantization: 'fp8' is not one of int8, int8-dynamic, int4"):
        LLM("demo", quantization="fp8")
