"""Ollama's client: chat and generate whole and streamed, tools, forms, vectors, and what it is told."""

import json
from typing import Any

import pytest
from live import LiveServer

ollama = pytest.importorskip("ollama")

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "num_predict": 24}


@pytest.fixture
def client(demo: LiveServer) -> Any:
    return ollama.Client(host=demo.url)


def test_chat_whole_and_streamed(client: Any) -> None:
    whole = client.chat(model="demo", messages=QUESTION, options=GREEDY, keep_alive="5m")
    assert "Paris" in whole.message.content and whole.done
    parts = list(client.chat(model="demo:latest", messages=QUESTION, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert (parts[-1].eval_count, parts[-1].done_reason) == (whole.eval_count, whole.done_reason)
    assert whole.total_duration > 0 and whole.prompt_eval_count > 0


def test_generate_whole_and_streamed(client: Any) -> None:
    whole = client.generate(model="demo", prompt=QUESTION[0]["content"], options=GREEDY)
    parts = client.generate(model="demo", prompt=QUESTION[0]["content"], options=GREEDY, stream=True)
    assert "".join(part.response for part in parts) == whole.response
    assert "Paris" in whole.response
    assert client.generate(model="demo", prompt="The capital", raw=True, options=GREEDY).response


async def test_the_asynchronous_client(demo: LiveServer) -> None:
    client = ollama.AsyncClient(host=demo.url)
    parts = await client.chat(model="demo", messages=QUESTION, options=GREEDY, stream=True)
    assert "Paris" in "".join([part.message.content async for part in parts])


def test_an_answer_in_a_schema(client: Any) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    answer = client.chat(model="demo", messages=QUESTION, format=schema, options={"num_predict": 60})
    assert json.loads(answer.message.content) == {"city": "Paris"}


def test_tools_of_python_functions(client: Any) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    answer = client.chat(model="demo", messages=QUESTION, tools=[add], options=GREEDY)
    assert answer.message.role == "assistant"
    called = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 3, "b": 4}}}],
    }
    told = {"role": "tool", "tool_name": "add", "content": "7"}
    again = client.chat(model="demo", messages=[*QUESTION, called, told], tools=[add], options=GREEDY)
    assert again.done


def test_vectors(client: Any) -> None:
    found = client.embed(model="demo", input=["Hello", "Good day"])
    assert len(found.embeddings) == 2
    assert sum(x * x for x in found.embeddings[0]) == pytest.approx(1, abs=1e-4)
    assert len(client.embeddings(model="demo", prompt="Hello").embedding) == len(found.embeddings[0])


def test_models_and_errors(client: Any) -> None:
    assert [model.model for model in client.list().models] == ["demo:latest"]
    assert client.ps().models[0].context_length > 0
    shown = client.show("demo")
    assert "completion" in shown.capabilities and shown.details.family
    with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
        client.chat(model="none", messages=QUESTION)
    assert caught.value.status_code == 404
    assert client.pull("demo").status == "success"
    with pytest.raises(ollama.ResponseError, match="/api/push is not here"):
        client.push("demo")
    with pytest.raises(ollama.ResponseError, match="warmth"):
        client.chat(model="demo", messages=QUESTION, options={"warmth": 1})
