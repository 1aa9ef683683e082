"""Short bodies of which templates and instructions make long texts."""

import json
from typing import Any

import msgspec
import pytest
from fake_frontend import FakeFrontend
from pydantic import TypeAdapter

from models.pooling.config import PoolingConfig
from models.pooling.text_files import TextFacts
from server.reading.body_table import BY_NAME
from server.reading.prompts import A_LOT
from server.reading.reading_context import ReadingContext, ReadingOptions
from server.requests.checkpoint_facts import QWEN3_RERANKER
from server.schemas.body import LONG

TALK = [{"role": "user", "content": "a"}]


def work(name: str, body: dict[str, Any], *, trusted: bool = True, **facts: Any) -> int:
    frontend = FakeFrontend()
    frontend.serve("embed", "classify", **facts)
    reader = ReadingContext(
        frontend.facts, frontend.tokenizer, ReadingOptions(trust_request_chat_template=trusted)
    )
    reading = BY_NAME[name]
    assert reading.work is not None
    return reading.work(TypeAdapter(reading.body).validate_python(body), reader)


@pytest.mark.parametrize("name", ["chat", "tokenize", "embeddings", "pooling", "classify"])
def test_a_template_of_the_request_is_much_work(name: str) -> None:
    assert work(name, {"messages": TALK}) < LONG
    assert work(name, {"messages": TALK, "chat_template": "{{ 1 }}"}) >= A_LOT
    assert work(name, {"messages": TALK, "chat_template": "{{ 1 }}"}, trusted=False) < LONG  # it is refused


def test_what_the_template_writes_of_each_conversation() -> None:
    written = len("<user>\n<assistant>")
    assert work("embeddings", {"input": [TALK] * 100}) == 100 * written


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("embeddings", {"input": ["a"] * 10}),
        ("pooling", {"input": [[1]] * 10}),
        ("cohere", {"texts": ["a"] * 10}),
        ("cohere", {"inputs": [{"content": "a"}] * 10}),
        ("embed", {"inputs": ["a"] * 10}),
        ("embed_all", {"inputs": ["a"] * 10}),
        ("similarity", {"inputs": {"source_sentence": "b", "sentences": ["a"] * 9}}),
    ],
)
def test_an_instruction_before_each_text(name: str, body: dict[str, Any]) -> None:
    assert work(name, body) == 0
    pooling = msgspec.structs.replace(PoolingConfig(), texts=TextFacts(prompts={"query": "x" * 30, "p": "y"}))
    assert work(name, body, pooling=pooling) == 300


def test_what_stands_beside_each_document() -> None:
    documents = ["a"] * 10
    assert work("score", {"text_1": "x" * 50, "text_2": documents}) == 500
    assert work("score", {"text_1": ["xx"] * 10, "text_2": documents}) == 20
    assert work("rerank", {"query": "x" * 50, "documents": documents, "instruction": "y" * 7}) == 570
    assert work("tei_rerank", {"query": "x" * 50, "texts": documents}) == 500
    written = work("rerank", {"query": "x", "documents": documents}, score_template=QWEN3_RERANKER)
    assert written == 10 * (1 + len(QWEN3_RERANKER))


@pytest.mark.parametrize("inputs", ["a", ["a", "b"], [["a"], ["b"]], [["a"], ["b", "c"]]])
def test_a_template_around_each_pair(inputs: Any) -> None:
    number = len(inputs) if isinstance(inputs[0], list) else 0
    assert work("predict", {"inputs": inputs}) == 0
    written = work("predict", {"inputs": inputs}, score_template=QWEN3_RERANKER)
    assert written == number * len(QWEN3_RERANKER)
    adapter = TypeAdapter(BY_NAME["predict"].body)  # what the helper is sent of a body says the same
    read = adapter.validate_python({"inputs": inputs})
    assert adapter.validate_json(json.dumps(read.model_dump(exclude_unset=True))) == read
