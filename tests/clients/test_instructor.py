"""Instructor: answers as classes, by a schema and by a tool."""

from typing import Literal

import pytest
from live import LiveServer

instructor = pytest.importorskip("instructor")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Place(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]
    is_capital: bool


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS_STRICT"])
def test_an_answer_is_an_instance(demo: LiveServer, mode: str) -> None:
    plain = openai.OpenAI(base_url=f"{demo.url}/v1", api_key="-")
    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    found = client.chat.completions.create(
        model="demo",
        response_model=Place,
        max_retries=0,
        temperature=0,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
    )
    assert isinstance(found, Place)
