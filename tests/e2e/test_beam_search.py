"""Beam search over HTTP, by the fields of vLLM."""

import threading
from typing import Any

import httpx
import openai
import pytest
from live import LiveServer

from facet import LLM, BeamSearchParams

PROMPT = "The capital of France is"
SEARCH = {"use_beam_search": True}


@pytest.mark.slow(3)
def test_the_best_answers_come_first(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt=[PROMPT, "Once upon"], max_tokens=12, n=3, logprobs=2, extra_body=SEARCH
    )
    with LLM("demo", dtype="float32", kv_cache_memory_bytes="64m") as llm:
        found = llm.beam_search([PROMPT, "Once upon"], BeamSearchParams(3, 12))
        expected = [
            llm.tokenizer.decode(each.tokens[len(llm.tokenizer.encode(prompt)) :])
            for prompt, output in zip([PROMPT, "Once upon"], found, strict=True)
            for each in output.sequences
        ]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(6))
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.top_logprobs is not None
        assert {len(each) for each in choice.logprobs.top_logprobs if each} <= {2, 3}
    assert answer.usage is not None and answer.usage.completion_tokens <= 6 * 12


def test_all_answers_that_are_followed_are_counted(client: openai.OpenAI) -> None:
    asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 6, "logprobs": 1}
    endless = {**SEARCH, "ignore_eos": True}
    all_three = client.completions.create(**asked, n=3, extra_body=endless)
    best = client.completions.create(**asked, n=1, extra_body={**endless, "best_of": 3})
    assert [choice.text for choice in best.choices] == [all_three.choices[0].text]
    assert best.usage is not None and all_three.usage is not None
    assert best.usage.completion_tokens == all_three.usage.completion_tokens == 3 * 6
    assert best.usage.prompt_tokens == all_three.usage.prompt_tokens


def test_a_chat_is_searched_beside_others(client: openai.OpenAI) -> None:
    def draw() -> None:
        client.completions.create(model="demo", prompt=PROMPT, max_tokens=60, extra_body={"ignore_eos": True})

    others = [threading.Thread(target=draw) for _ in range(3)]
    for other in others:
        other.start()
    found = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=20,
        n=2,
        extra_body={**SEARCH, "length_penalty": 0.0, "early_stopping": True},
    )
    assert len({choice.message.content for choice in found.choices}) == 2
    for other in others:
        other.join()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**SEARCH, "stream": True}, "Streaming is not currently supported with beam search."),
        ({"length_penalty": 2.0}, "`length_penalty` is for beam search: set `use_beam_search` too."),
        ({"early_stopping": True}, "`early_stopping` is for beam search: set `use_beam_search` too."),
        ({**SEARCH, "presence_penalty": 1.0}, "beam search does not support `presence_penalty`"),
        ({**SEARCH, "stop": ["a"]}, "beam search does not support `stop`"),
        ({**SEARCH, "n": 1000}, "n must be at most"),
        ({**SEARCH, "length_penalty": 40}, "length_penalty must be from -10 to 10"),
        ({**SEARCH, "structured_outputs": {"choice": ["a"]}}, "takes no grammar"),
        ({**SEARCH, "echo": True, "logprobs": 1}, "beam search does not support `prompt_logprobs`"),
    ],
)
def test_what_cannot_be_searched_is_refused(demo: LiveServer, fields: dict[str, Any], message: str) -> None:
    answer = httpx.post(f"{demo.url}/v1/completions", json={"prompt": PROMPT, **fields}, timeout=60)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]
