"""OpenAI's own package in the version that other clients bring along: answers as classes, and vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Literal

import pytest
from live import LiveServer

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Place(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]
    is_capital: bool


QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(demo: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def test_an_answer_is_read_into_a_class(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="demo", messages=QUESTION, response_format=Place, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Place)
    responded = client.responses.parse(model="demo", input=QUESTION, text_format=Place, temperature=0)
    assert isinstance(responded.output_parsed, Place)


def test_a_stream_of_responses_ends_with_the_whole(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input="What is the capital of France?") as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(pieces) == stream.get_final_response().output_text


def test_many_texts_are_embedded_in_order_as_an_evaluation_sends_them(client: openai.OpenAI) -> None:
    """MTEB's class for this API sends lists of texts and reads `data[i].embedding`."""
    texts = [f"sentence {number}" for number in range(300)]
    vectors = client.embeddings.create(model="demo", input=texts, encoding_format="float").data
    assert [one.index for one in vectors] == list(range(300))
    packed = client.embeddings.create(model="demo", input=texts[:3]).data
    assert packed[2].embedding == pytest.approx(vectors[2].embedding)


def test_the_asynchronous_client_streams(demo: LiveServer) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="-") as client:
            stream = await client.chat.completions.create(model="demo", messages=QUESTION, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    assert "Paris" in asyncio.run(ask())
