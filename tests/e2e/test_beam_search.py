"""Beam search over HTTP, by the fields of vLLM."""

import threading

import openai
import pytest

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
