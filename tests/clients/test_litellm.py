"""LiteLLM, as a client of OpenAI's chat completions and of Anthropic's Messages."""

import os
from pathlib import Path
from typing import Any

import pytest
from live import LiveServer

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it fetches one when it is imported
litellm = pytest.importorskip("litellm")
yaml = pytest.importorskip("yaml")

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "clients" / "litellm.yaml"
litellm.suppress_debug_info = True

QUESTION = "What is the capital of France?"


@pytest.fixture(params=["openai", "anthropic"])
def asked(request: pytest.FixtureRequest, demo: LiveServer) -> dict[str, Any]:
    """The arguments of a request to one of the two APIs."""
    return {
        "model": f"{request.param}/demo",
        "api_base": demo.url + ("/v1" if request.param == "openai" else ""),
        "api_key": "-",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 30,
    }


def test_completion(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 0


def test_a_stream_says_the_same(asked: dict[str, Any]) -> None:
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]
    assert len(pieces) > 2
    assert "".join(pieces) == litellm.completion(**asked).choices[0].message.content


def test_errors_have_their_classes(asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": asked["model"] + "-of-another"})
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**asked, "temperature": 3})


def test_embeddings(demo: LiveServer) -> None:
    answer = litellm.embedding(
        model="openai/demo", api_base=f"{demo.url}/v1", api_key="-", input=["Hello", "Good day"]
    )
    assert [len(one["embedding"]) > 8 for one in answer.data] == [True, True]


def test_rerank(demo: LiveServer) -> None:
    answer = litellm.rerank(
        model="hosted_vllm/demo",
        api_base=demo.url,
        api_key="-",
        query="the capital of France",
        documents=["It rains.", "Paris is the capital of France."],
    )
    assert len(answer.results) == 2
    assert answer.results[0]["relevance_score"] >= answer.results[1]["relevance_score"]


async def test_the_configuration_of_its_proxy(demo: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file in deploy/, read by the router that its proxy is made of; only the address is ours."""
    monkeypatch.setenv("FACET_API_KEY", "any-word")
    text = CONFIGURATION.read_text("utf-8").replace("http://localhost:8000", demo.url)
    router = litellm.Router(model_list=yaml.safe_load(text)["model_list"])
    answer = await router.acompletion(
        model="chat", messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0
    )
    assert "Paris" in answer.choices[0].message.content
    found = await router.aembedding(model="embed", input=["one", "two"], encoding_format="float")
    assert len(found.data) == 2
    documents = ["It rains.", "Paris is the capital of France."]
    ranked = await router.arerank(model="rerank", query="the capital of France", documents=documents)
    assert sorted(one["index"] for one in ranked.results) == [0, 1]
