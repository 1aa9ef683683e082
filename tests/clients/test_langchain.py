"""LangChain's class for OpenAI's API, over chat completions and over Responses."""

from typing import Any, Literal

import pytest
from live import LiveServer
from pydantic import BaseModel

langchain_openai = pytest.importorskip("langchain_openai")

QUESTION = "What is the capital of France?"
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(request: pytest.FixtureRequest, demo: LiveServer) -> Any:
    return langchain_openai.ChatOpenAI(
        model="demo",
        base_url=f"{demo.url}/v1",
        api_key="-",
        temperature=0,
        use_responses_api=request.param,
    )


def test_invoke(model: Any) -> None:
    answer = model.invoke([("system", "Be brief."), ("user", QUESTION)])
    assert "Paris" in answer.text
    assert answer.usage_metadata["output_tokens"] > 0


def test_a_stream_says_the_same(model: Any) -> None:
    pieces = [piece.text for piece in model.stream(QUESTION)]
    assert len(pieces) > 2 and "".join(pieces) == model.invoke(QUESTION).text


def test_an_answer_goes_back(model: Any) -> None:
    answer = model.invoke(QUESTION)
    assert model.invoke([("user", QUESTION), answer, ("user", QUESTION)]).text


def test_tools_may_be_bound(model: Any) -> None:
    assert "Paris" in model.bind_tools([TOOL]).invoke(QUESTION).text


class Place(BaseModel):
    """A place."""

    city: Literal["Paris", "Rome"]
    is_capital: bool


def test_an_answer_has_the_form_of_a_class(model: Any) -> None:
    assert isinstance(model.with_structured_output(Place).invoke(QUESTION), Place)


def test_a_tool_that_must_be_called_is(model: Any) -> None:
    [call] = model.bind_tools([Place], tool_choice="Place", strict=True).invoke(QUESTION).tool_calls
    assert call["name"] == "Place" and isinstance(call["args"]["city"], str)


def test_texts_are_embedded(demo: LiveServer) -> None:
    embedder = langchain_openai.OpenAIEmbeddings(
        model="demo", base_url=f"{demo.url}/v1", api_key="-", check_embedding_ctx_length=False
    )
    first, second = embedder.embed_documents(["Hello", "Good day"])
    assert len(first) == len(second) and embedder.embed_query("Hello") == pytest.approx(first, abs=1e-5)


def test_chats_by_the_api_of_ollama(demo: LiveServer) -> None:
    chats = pytest.importorskip("langchain_ollama")
    model = chats.ChatOllama(model="demo", base_url=demo.url, temperature=0, num_predict=24)
    whole = model.invoke("What is the capital of France?").content
    assert "Paris" in whole
    assert "".join(part.content for part in model.stream("What is the capital of France?")) == whole
    embedder = chats.OllamaEmbeddings(model="demo", base_url=demo.url)
    assert len(embedder.embed_documents(["Hello", "Good day"])) == 2
