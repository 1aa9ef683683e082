"""A hybrid as a user serves it: prefixes are found, and answers are the same however they are asked for."""

from pathlib import Path

import pytest
from live import LiveServer, chunks, serving
from tiny import tiny_checkpoint

PROMPT = "One friend and another went to the sea and came home late. " * 12
OPTIONS = (
    *("--dtype", "float32", "--num-gpu-blocks-override", "400", "--max-num-seqs", "4"),
    "--enable-prompt-tokens-details",
)


def ask(server: LiveServer, prompt: str, **more: str) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were cached."""
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}
    answer = server.post("/v1/completions", body).json()
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["text"], details.get("cached_tokens", 0)


@pytest.mark.slow(2)
def test_prefixes_are_found_and_answers_do_not_change(tmp_path: Path) -> None:
    folder = tiny_checkpoint("Qwen3_5ForCausalLM", tmp_path / "hybrid", max_position_embeddings=4096)
    with serving(str(folder), *OPTIONS) as server:
        first, cached = ask(server, PROMPT)
        assert cached == 0
        longer = PROMPT + first + " And then?"
        again, cached = ask(server, longer)
        assert cached > 200, "the next turn goes on from the state behind the answer"
        body = {"prompt": longer, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True}
        with server.stream("/v1/completions", body) as response:
            streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks(response) if chunk["choices"])
        assert streamed == again
        embedded = server.post("/v1/embeddings", {"input": "the sea"})
        assert len(embedded.json()["data"][0]["embedding"]) > 0
        assert ask(server, longer, cache_salt="another") == (again, 0), "what others asked is not found"
