"""POST /tokenize and /detokenize."""

from typing import Any

import httpx
import pytest
from fake_frontend import BOS

TALK = [{"role": "user", "content": "hi"}]
WRITTEN = b"<user>hi\n<assistant>"


async def tokens_of(client: httpx.AsyncClient, **body: Any) -> Any:
    response = await client.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_text(client: httpx.AsyncClient) -> None:
    assert await tokens_of(client, prompt="hi") == {
        "count": 3,
        "max_model_len": 128,
        "tokens": [BOS, 104, 105],
        "token_strs": None,
    }


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "hi", "add_special_tokens": False}, [104, 105]),
        ({"prompt": ""}, [BOS]),
        ({"messages": TALK}, [*WRITTEN]),
        ({"messages": TALK, "add_special_tokens": True}, [BOS, *WRITTEN]),
        ({"messages": TALK, "add_generation_prompt": False}, [*b"<user>hi\n"]),
        ({"messages": TALK, "continue_final_message": True}, [*b"<user>hi"]),
        ({"messages": TALK, "chat_template_kwargs": {"mood": "x"}}, [*b"<user>hi\n(x)<assistant>"]),
        ({"prompt": "a" * 500, "add_special_tokens": False}, [97] * 500),
    ],
)
async def test_tokens(client: httpx.AsyncClient, body: dict[str, Any], tokens: list[int]) -> None:
    answer = await tokens_of(client, **body)
    assert (answer["tokens"], answer["count"]) == (tokens, len(tokens))


async def test_token_strings(client: httpx.AsyncClient) -> None:
    found = await tokens_of(client, prompt="h é", return_token_strs=True)
    assert found["token_strs"] == ["<bos>", "h", "Ġ", "Ã", "©"]  # as the vocabulary spells them


async def test_there_and_back(client: httpx.AsyncClient) -> None:
    text = "Grüße, 漢字 🙂"
    tokens = (await tokens_of(client, prompt=text, add_special_tokens=False))["tokens"]
    assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}
    special = await client.post("/detokenize", json={"tokens": [BOS, 104]})
    assert special.json() == {"prompt": "<bos>h"}
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "Exactly one of `prompt` and `messages`"),
        ("/tokenize", {"prompt": "a", "messages": TALK}, "Exactly one of `prompt` and `messages`"),
        ("/tokenize", {"prompt": "x" * 3_000_000}, "This model's maximum context length is 128 tokens"),
        ("/detokenize", {"tokens": [1] * 2049}, "`tokens` may hold at most 2048 ids, got 2049."),
        ("/detokenize", {"tokens": [258]}, "out-of-vocab token ids. Vocabulary size: 258"),
    ],
)
async def test_refused(client: httpx.AsyncClient, path: str, body: dict[str, Any], message: str) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
async def test_another_model(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    assert (await client.post(path, json={**body, "model": "x"})).status_code == 404
    assert (await client.post(path, json={**body, "model": "tiny"})).status_code == 200
