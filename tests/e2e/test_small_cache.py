"""A cache of 8 bits as a user serves it: a prefix that is found gives the answer that reading it gives."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from live import LiveServer, serving

PROMPT = "Once there was a child who had a red ball and a small dog. " * 20
FLAGS = (
    *("demo", "--dtype", "bfloat16", "--kv-cache-dtype", "int8", "--kv-cache-memory-bytes", "16m"),
    "--enable-prompt-tokens-details",
)


def ask(server: LiveServer, prompt: str, **more: Any) -> tuple[list[int], list[float], int]:
    """The tokens of an answer, their log-probabilities, and how many tokens of the prompt were cached."""
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    answer = server.post("/v1/completions", body | {"return_token_ids": True, **more}).json()
    [choice] = answer["choices"]
    details = answer["usage"].get("prompt_tokens_details") or {}
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], details.get("cached_tokens", 0)


@pytest.mark.slow
def test_hits_and_batches_have_the_bits_of_reading_alone() -> None:
    with serving(*FLAGS) as server:
        *alone, cached = ask(server, PROMPT, cache_salt="alone")
        assert cached == 0
        assert ask(server, PROMPT, cache_salt="first")[2] == 0
        *hit, cached = ask(server, PROMPT, cache_salt="first")
        assert hit == alone
        assert cached > 200
        with ThreadPoolExecutor(8) as pool:
            salts = [f"batch {number}" for number in range(8)]
            together = list(pool.map(lambda salt: ask(server, PROMPT, cache_salt=salt), salts))
        assert all([*each[:2]] == alone for each in together)
