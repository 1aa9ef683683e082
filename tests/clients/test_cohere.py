"""Cohere's client of version 2: chat, rerank and embed."""

from typing import Any

import pytest
from live import LiveServer

cohere = pytest.importorskip("cohere")

DOCUMENTS = ["Cats are animals.", "Paris is the capital of France.", "It rains."]


@pytest.fixture
def client(demo: LiveServer) -> Any:
    return cohere.ClientV2(api_key="-", base_url=demo.url)


def test_rerank(client: Any) -> None:
    answer = client.rerank(model="demo", query="the capital of France", documents=DOCUMENTS, top_n=2)
    scores = [one.relevance_score for one in answer.results]
    assert len(scores) == 2 and scores == sorted(scores, reverse=True)


def test_embed(client: Any) -> None:
    answer = client.embed(
        model="demo", texts=DOCUMENTS, input_type="search_document", embedding_types=["float", "ubinary"]
    )
    assert len(answer.embeddings.float_) == len(answer.embeddings.ubinary) == 3


ASKED: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_chat(client: Any) -> None:
    asked: Any = {"model": "demo", "messages": ASKED, "temperature": 0, "max_tokens": 40, "logprobs": True}
    whole = client.chat(**asked)
    text = whole.message.content[-1].text
    assert whole.finish_reason in ("COMPLETE", "MAX_TOKENS") and whole.usage.tokens.output_tokens > 1
    assert "".join(item.text for item in whole.logprobs) == text
    events = list(client.chat_stream(**asked))
    assert "".join(one.delta.message.content.text for one in events if one.type == "content-delta") == text
    assert [events[0].type, events[-1].type] == ["message-start", "message-end"]
    assert events[-1].delta.finish_reason == whole.finish_reason


def test_chat_with_tools(client: Any) -> None:
    answer = client.chat(model="demo", messages=ASKED, tools=[TOOL], tool_choice="REQUIRED", temperature=0)
    [call] = answer.message.tool_calls
    assert answer.finish_reason == "TOOL_CALL" and call.function.name == "get_weather"
    document: Any = {"type": "document", "document": {"data": {"weather": "sunny"}}}
    said = [
        *ASKED,
        {"role": "assistant", "tool_calls": [call], "tool_plan": "I look."},
        {"role": "tool", "tool_call_id": call.id, "content": [document]},
    ]
    again = client.chat(model="demo", messages=said, tools=[TOOL], max_tokens=20)
    assert again.message.role == "assistant"
    with pytest.raises(cohere.NotFoundError):
        client.chat(model="other", messages=ASKED)
