"""Embeddings of tokens, at a real server with the built-in model, are answered as these tokens are."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from live import LiveServer, serving
from safetensors.torch import load_file

pytestmark = pytest.mark.turns(5)

DEMO = Path(__file__).parents[2] / "models" / "demo"
TEXT = "Once upon a time there was a little girl who lived in a small house. One day she"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    memory = ("--kv-cache-memory-bytes", "64M")
    with serving(
        "demo", "--dtype", "float32", *memory, "--enable-prompt-embeds", "--trust-request-chat-template"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def ids(server: LiveServer) -> list[int]:
    return server.post("/tokenize", {"prompt": TEXT}).json()["tokens"]


def encoded(ids: list[int]) -> str:
    table = load_file(DEMO / "model.safetensors")["model.embed_tokens.weight"]
    file = io.BytesIO()
    torch.save(table[torch.tensor(ids)], file)
    return base64.b64encode(file.getvalue()).decode()


def complete(server: LiveServer, **body: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", {"max_tokens": 12, "temperature": 0, "logprobs": 1, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_embeddings_of_tokens_are_answered_as_these(server: LiveServer, ids: list[int]) -> None:
    many = (ids * 40)[:600]  # its body is read by the helper
    for prompt in (ids, many):
        plain = complete(server, prompt=prompt)
        found = complete(server, prompt_embeds=encoded(prompt))
        assert found["choices"] == plain["choices"]
        assert found["usage"]["prompt_tokens"] == len(prompt)
    both = complete(server, prompt_embeds=[encoded(many), encoded(ids)], prompt=ids, n=2)["choices"]
    assert [each["text"] for each in both[2:4]] == [each["text"] for each in both[4:]]
    assert both[0]["text"] == plain["choices"][0]["text"]
    beams = {"use_beam_search": True, "n": 3, "logprobs": None}
    assert (
        complete(server, prompt_embeds=encoded(ids), **beams)["choices"]
        == (complete(server, prompt=ids, **beams)["choices"])
    )


def test_chats_have_them_among_texts(server: LiveServer) -> None:
    ids = server.post("/tokenize", {"prompt": "a cat and a dog", "add_special_tokens": False}).json()[
        "tokens"
    ]
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": TEXT}, {"type": "prompt_embeds", "data": encoded(ids)}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 12, "temperature": 0}
    answer = server.post("/v1/chat/completions", {**body, "chat_template": template}).json()
    read = server.post("/tokenize", {"prompt": TEXT}).json()["tokens"]
    plain = complete(server, prompt=[*read, *ids])
    assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == len(read) + len(ids)


def test_the_openai_client_streams_them(server: LiveServer, ids: list[int]) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        stream = client.completions.create(
            model="demo",
            prompt="",
            max_tokens=12,
            temperature=0,
            stream=True,
            extra_body={"prompt_embeds": encoded(ids)},
        )
        text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == complete(server, prompt=ids)["choices"][0]["text"]
