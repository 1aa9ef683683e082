"""Structured output without HTTP: `LLM`, and `AsyncLLM`."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from facet import LLM, AsyncLLM, BadRequest, SamplingParams, StructuredOutputsParams

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": "64M"}


@pytest.fixture(scope="module")
def llm():
    llm = LLM("demo", **OPTIONS)
    yield llm
    llm.llm_engine.shutdown()


def params(**form: Any) -> SamplingParams:
    return SamplingParams(
        temperature=1, seed=1, max_tokens=200, structured_outputs=StructuredOutputsParams(**form)
    )


def test_answers_are_in_the_form_that_was_asked_for(llm: LLM) -> None:
    forms = [params(json=SCHEMA), params(choice=["yes", "no"]), params(regex="[0-9]{4}")]
    as_json, choice, digits = (
        output.outputs[0].text for output in llm.generate(["a", "b", "c"], forms, use_tqdm=False)
    )
    jsonschema.validate(json.loads(as_json), SCHEMA)
    assert choice in ("yes", "no") and digits.isdecimal() and len(digits) == 4


def test_each_choice_of_a_chat_has_the_form(llm: LLM) -> None:
    several = params(json=json.dumps(SCHEMA))
    several.n = 3
    [output] = llm.chat([{"role": "user", "content": "hi"}], several, use_tqdm=False)
    for one in output.outputs:
        if one.finish_reason == "stop":
            jsonschema.validate(json.loads(one.text), SCHEMA)


def test_what_cannot_be_used_is_refused(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="unclosed group"):
        llm.generate("a", params(regex="(a"), use_tqdm=False)
    with pytest.raises(BadRequest, match="You must use one kind"):
        llm.generate("a", params(), use_tqdm=False)
    with pytest.raises(BadRequest, match="takes StructuredOutputsParams"):
        llm.generate("a", SamplingParams(structured_outputs={"regex": "a"}), use_tqdm=False)  # pyright: ignore


def test_what_is_not_enforced_is_logged(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    unique = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True}
    llm.generate("a", params(json=unique), use_tqdm=False)
    assert "structured_outputs: not enforced: uniqueItems" in caplog.text


async def test_an_asynchronous_model_has_them_too() -> None:
    llm = AsyncLLM("demo", **OPTIONS)
    try:
        outputs = [output async for output in llm.generate("a", params(choice=["one", "two"]))]
        assert outputs[-1].outputs[0].text in ("one", "two")
    finally:
        llm.shutdown()
