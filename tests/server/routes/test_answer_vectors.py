"""The vector and the score of an answer, in its choice."""

import json

import httpx
import pytest
from fake_api import post, refusal
from fake_frontend import FakeFrontend, vectors

from models.pooling.config import PoolingConfig, VectorFacts
from server.requests.pooling import Item
from server.text.tokenizer import unpack

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def pooling(frontend: FakeFrontend) -> None:
    """A model that generates, embeds and scores; its vectors tell how many tokens they are of."""
    made = {"embed": VectorFacts("ab" * 32, "last", True, 2)}
    frontend.serve("generate", "embed", "classify", pooling=PoolingConfig(num_labels=1), vectors=made)

    def answer(item: Item) -> object:
        return vectors([len(unpack(item.tokens)), 1] if item.params.task == "embed" else [0.25])

    frontend.answer_of = answer  # pyright: ignore[reportAttributeAccessIssue]


async def test_the_whole_answer_is_pooled(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    for path, body in ((CHAT, {"messages": SAID}), (COMPLETIONS, {"prompt": "hi"})):
        asked = {**body, "return_token_ids": True, "include": ["embedding", "score"], "cache_salt": "mine"}
        answer = await post(client, path, **asked)
        [choice] = answer["choices"]
        ids = (answer if path == CHAT else choice)["prompt_token_ids"] + choice["token_ids"]
        items, options = frontend.pooled[-1]
        assert [unpack(item.tokens) for item in items] == [ids, ids]
        assert options["salt"] == "mine"
        usage = answer["usage"]  # of the prompt, and of both texts that were pooled
        assert usage["prompt_tokens"] + usage["completion_tokens"] == 3 * len(ids) == usage["total_tokens"]
        assert (choice["embedding"], choice["score"]) == ([len(ids), 1], 0.25)
        tokens = await post(client, "/v1/embeddings", input=ids)
        assert choice["embedding_space"] == tokens["embedding_space"]


async def test_each_choice_of_a_stream(client: httpx.AsyncClient) -> None:
    asked = {"prompt": "hi", "n": 2, "stream": True, "include": ["embedding"]}
    text = (await client.post(COMPLETIONS, json=asked)).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    with_vectors = [choice for choice in choices if "embedding" in choice]
    assert sorted(choice["index"] for choice in with_vectors) == [0, 1]
    assert all(choice["finish_reason"] and choice["embedding_space"] for choice in with_vectors)
    assert not any("score" in choice for choice in choices)


async def test_what_cannot_be_pooled(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    said = await refusal(client, "/v1/embeddings", input="a", include=["embedding"])
    assert "for answers of chats and completions" in said["message"]
    frontend.serve("generate", "classify", pooling=PoolingConfig(num_labels=3))
    said = await refusal(client, COMPLETIONS, prompt="a", include=["score"])
    assert "gives 3 labels" in said["message"]
    said = await refusal(client, COMPLETIONS, prompt="a", include=["embedding"])
    assert "does not do the task 'embed'" in said["message"]
