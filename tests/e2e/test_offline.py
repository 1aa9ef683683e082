"""The same requests have the same answers by `LLM`, `LLMEngine`, `AsyncLLM` and HTTP."""

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from live import LiveServer

from facet import LLM, AsyncLLM, LLMEngine, PoolingParams, RequestOutput, RequestOutputKind, SamplingParams

pytestmark = pytest.mark.turns(3)

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": "64m", "cpu_threads": 1}
PROMPTS = ["The capital of France is", "Once upon a time", "日本語 🎌 and", "x"]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "n": {"temperature": 1.0, "seed": 5, "n": 3},
    "stop": {"temperature": 0, "stop": ["a", "."]},
    "penalties": {"temperature": 0, "repetition_penalty": 2.0, "presence_penalty": 1.0},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "unasked": {},
}
"""All but "unasked" have a seed or are greedy; of that one only the length can be compared."""

KINDS = (RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY)

Answer = list[tuple[list[int], str, str | None, int | str | None]]
"""Tokens, text, finish reason and stop reason of each choice."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **OPTIONS) as llm:
        yield llm


def answer(output: RequestOutput) -> Answer:
    return [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in output.outputs]


def by_http(server: LiveServer, prompt: str, params: dict[str, Any]) -> Answer:
    body = {"prompt": prompt, "return_token_ids": True, **params}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return [
        (one["token_ids"], one["text"], one["finish_reason"], one["stop_reason"])
        for one in response.json()["choices"]
    ]


def by_steps(engine: LLMEngine, params: SamplingParams) -> list[Answer]:
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, params)
    ended: dict[str, Answer] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished and isinstance(output, RequestOutput):
                ended[output.request_id] = answer(output)
    return [ended[str(number)] for number in range(len(PROMPTS))]


class Streamed(NamedTuple):
    """What `AsyncLLM` says: the answers by parameters and kind of output, and the first prompt's vector."""

    answers: dict[tuple[str, RequestOutputKind], list[Answer]]
    vector: list[float]


async def by_streams() -> Streamed:
    async def last(engine: AsyncLLM, prompt: str, params: SamplingParams) -> Answer:
        return answer([output async for output in engine.generate(prompt, params)][-1])

    async with AsyncLLM("demo", **OPTIONS) as engine:
        [pooled] = [one async for one in engine.encode(PROMPTS[0], PoolingParams(task="embed"))]
        answers = {
            (name, kind): await asyncio.gather(
                *(last(engine, prompt, SamplingParams(**params, output_kind=kind)) for prompt in PROMPTS)
            )
            for name, params in PARAMS.items()
            for kind in KINDS
        }
        return Streamed(answers, pooled.outputs.data.tolist())


@pytest.fixture(scope="module")
def streamed() -> Streamed:
    return asyncio.run(by_streams())


@pytest.mark.parametrize("name", PARAMS)
def test_the_same_answers(demo: LiveServer, llm: LLM, streamed: Streamed, name: str):
    params = SamplingParams(**PARAMS[name])
    whole = [answer(output) for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    others = [
        by_steps(llm.llm_engine, params),
        *(streamed.answers[name, kind] for kind in KINDS),
        [by_http(demo, prompt, {"max_tokens": 16, **PARAMS[name]}) for prompt in PROMPTS],
    ]
    if name == "unasked":
        assert all(len(ids) <= 16 for one in [whole, *others] for texts in one for ids, *_ in texts)
    else:
        assert others == [whole] * 4


def test_the_same_logprobs(demo: LiveServer, llm: LLM):
    params = SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    body = {"prompt": PROMPTS[0], "temperature": 0, "logprobs": 2, "prompt_logprobs": 1}
    (choice,) = demo.post("/v1/completions", body).json()["choices"]
    (mine,) = output.outputs
    assert mine.logprobs is not None and output.prompt_logprobs is not None
    for table, names in zip(mine.logprobs, choice["logprobs"]["top_logprobs"], strict=True):
        found = {one.decoded_token: one.logprob for one in table.values()}
        assert found == pytest.approx(names, abs=1e-4)
    for table, named in zip(output.prompt_logprobs, choice["prompt_logprobs"], strict=True):
        assert (table is None) == (named is None)
        for id, one in (table or {}).items():
            assert named[str(id)]["logprob"] == pytest.approx(one.logprob, abs=1e-4)
            assert (named[str(id)]["rank"], named[str(id)]["decoded_token"]) == (one.rank, one.decoded_token)


def test_the_same_vectors(demo: LiveServer, llm: LLM, streamed: Streamed):
    (mine,) = llm.embed(PROMPTS[0], use_tqdm=False)
    theirs = demo.post("/v1/embeddings", {"input": PROMPTS[0]}).json()["data"][0]["embedding"]
    assert mine.outputs.embedding == pytest.approx(theirs, abs=1e-6)
    assert streamed.vector == pytest.approx(theirs, abs=1e-6)
