"""POST /pooling and /classify, and requests for tasks that the model does not do."""

import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest
from fake_api import post, refusal
from fake_frontend import BOS, FakeFrontend, vectors

from models.pooling.config import PoolingConfig

pytestmark = pytest.mark.usefixtures("embedder")

EMBED, POOL, CLASSIFY, COHERE = "/v1/embeddings", "/pooling", "/classify", "/v2/embed"


@pytest.mark.parametrize(
    ("tasks", "path", "body"),
    [
        (("generate",), EMBED, {"input": "a"}),
        (("generate",), COHERE, {"texts": ["a"]}),
        (("generate",), POOL, {"input": "a"}),
        (("embed",), CLASSIFY, {"input": "a"}),
        (("token_classify",), EMBED, {"input": "a"}),
        (("embed",), POOL, {"input": "a", "task": "classify"}),
        (("embed",), "/embed_all", {"inputs": "a"}),
        (("embed",), "/predict", {"inputs": "a"}),
        (("embed",), "/v1/completions", {"prompt": "a"}),
        (("embed",), "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        (("generate",), "/rerank", {"query": "a", "documents": ["b"]}),
        (("generate",), "/similarity", {}),
        (("generate",), "/v1/score", {}),
    ],
)
async def test_what_the_model_cannot_do(
    client: httpx.AsyncClient, frontend: FakeFrontend, tasks: tuple[str, ...], path: str, body: dict[str, Any]
) -> None:
    frontend.serve(*tasks)
    error = await refusal(client, path, **body)
    assert error["message"].startswith("This model does not do the task ")
    assert f"It does: {tasks[0]} (POST /" in error["message"]


async def test_why_tasks_for_tokens_are_not_offered_beside_generation(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    frontend.serve("generate", "embed")
    for task in ("token_embed", "encode"):
        error = await refusal(client, POOL, input="a", task=task)
        assert error["message"].endswith("is started with --tasks generate,embed,token_embed.")
    error = await refusal(client, POOL, input="a", task="classify")
    assert "--tasks" not in error["message"]


async def test_any_task(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    answer = await post(client, POOL, input="ab")
    assert answer["id"].startswith("pooling-")
    assert answer["data"][0]["object"] == "pooling" and len(answer["data"][0]["data"]) == 8
    frontend.answer_of = lambda item: vectors([[token, 1] for token in item.tokens])
    for task in ("token_embed", "encode"):
        answer = await post(client, POOL, input="ab", task=task)
        assert answer["data"][0]["data"] == [[BOS, 1], [97, 1], [98, 1]]
        assert frontend.pooled[-1][0][0].params.task == "token_embed"
    coded = await post(client, POOL, input="ab", task="token_embed", encoding_format="base64")
    assert np.frombuffer(base64.b64decode(coded["data"][0]["data"]), "<f4").tolist() == [
        BOS, 1, 97, 1, 98, 1,
    ]  # fmt: skip
    response = await client.post(
        POOL, json={"input": "ab", "task": "token_embed", "encoding_format": "bytes"}
    )
    assert json.loads(response.headers["metadata"])["data"][0]["shape"] == [3, 2]
    frontend.serve("classify", "token_classify")
    for asked, task in (("score", "classify"), ("reward", "token_classify"), (None, "classify")):
        await post(client, POOL, input="a", task=asked)
        assert frontend.pooled[-1][0][0].params.task == task
    error = await refusal(client, POOL, input="a", dimensions=2)
    assert error["message"] == (
        "Task 'classify' only supports ['use_activation'] parameters, "
        "does not support ['dimensions'] parameters"
    )


async def test_labels(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    config = PoolingConfig(num_labels=3, labels=("bad", "so so", "good"))
    frontend.serve("classify", pooling=config)
    frontend.answer_of = lambda item: vectors([0.25, 0.25, 0.5] if item.tokens[1] == 97 else [0.5, 0.5, 0])
    answer = await post(client, CLASSIFY, input=["a", "b"])
    assert answer["id"].startswith("classify-")
    assert answer["data"] == [
        {"index": 0, "label": "good", "probs": [0.25, 0.25, 0.5], "num_classes": 3},
        {"index": 1, "label": "bad", "probs": [0.5, 0.5, 0.0], "num_classes": 3},
    ]
    frontend.serve("classify", pooling=PoolingConfig(num_labels=3))
    answer = await post(client, CLASSIFY, messages=[{"role": "user", "content": "a"}], softmax=False)
    assert answer["data"][0]["label"] is None
    assert frontend.pooled[-1][0][0].params.use_activation is False


async def test_labels_of_a_request_are_for_models_that_compare(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    labels = ("joy", "anger")
    frontend.serve("classify", pooling=PoolingConfig(num_labels=len(labels), labels=labels))
    told = (await refusal(client, "/classify", input="x", labels=["a"]))["message"]
    assert "such as CLIP; this one has labels of its own: joy, anger" in told
