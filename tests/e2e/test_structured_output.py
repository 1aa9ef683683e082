"""Answers of models that write at random: whatever ends with `stop` is what was asked for."""

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from live import LiveServer, preemptions, serving
from schemas import SCHEMAS, Schema, random_schema
from tiny import tiny_checkpoint

MESSAGES = [{"role": "user", "content": "hi"}]
DRAWS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.5, "seed": 7},
    {"temperature": 1, "seed": 3, "n": 3, "logprobs": True, "top_logprobs": 2},
    {"temperature": 1, "seed": 5, "presence_penalty": 1.5, "min_tokens": 3, "stop": ["~~"]},
]


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def server(random_model: Path, request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    """A server whose cache is so small that answers are preempted."""
    cache = ("--num-gpu-blocks-override", "34", "--block-size", "16", "--max-num-seqs", "16")
    ranks = ("--tensor-parallel-size", str(request.param))
    with serving(str(random_model), "--dtype", "float32", *cache, *ranks) as live:
        yield live


def body_of(schema: Schema, **more: Any) -> dict[str, Any]:
    named = {"name": "answer", "schema": schema}
    form = {"type": "json_schema", "json_schema": named}
    return {"messages": MESSAGES, "max_tokens": 250, "response_format": form, **more}


def streamed(server: LiveServer, body: dict[str, Any]) -> list[tuple[str, str | None]]:
    """The text of each choice of a stream, and how it ended."""
    texts, ends = [""] * body.get("n", 1), [None] * body.get("n", 1)
    with server.stream("/v1/chat/completions", {**body, "stream": True}, timeout=150) as got:
        assert got.status_code == 200
        for line in got.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["delta"].get("content") or ""
                    ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
    return list(zip(texts, ends, strict=True))


def whole(server: LiveServer, body: dict[str, Any]) -> list[tuple[str, str | None]]:
    answer = server.post("/v1/chat/completions", body, timeout=150)
    assert answer.status_code == 200, answer.text
    return [(choice["message"]["content"], choice["finish_reason"]) for choice in answer.json()["choices"]]


@pytest.mark.turns
@pytest.mark.parametrize("odd", [0, 1], ids=["", "others"])
def test_answers_validate_and_repeat(server: LiveServer, odd: int) -> None:
    """Each schema has two of the four draws, one of which is streamed."""
    asked = [
        (schema, (streamed, whole)[column // 2], body_of(schema, **draw))
        for row, schema in enumerate(SCHEMAS.values())
        for column, draw in enumerate(DRAWS)
        if (row + column + odd) % 2
    ]
    most_end(server, asked)
    body = body_of(SCHEMAS["object"], temperature=1, seed=11, n=2)
    assert whole(server, body) == streamed(server, body), "a seed repeats the answer"


@pytest.mark.slow
def test_answers_of_schemas_drawn_by_chance_validate(server: LiveServer) -> None:
    drawn = [random_schema(random.Random(number)) for number in range(160)]
    asked = [
        (schema, (whole, streamed)[row // len(DRAWS) % 2], body_of(schema, **DRAWS[row % len(DRAWS)]))
        for row, schema in enumerate(drawn)
    ]
    most_end(server, asked)
    assert preemptions(server) > 0


def most_end(server: LiveServer, asked: list[tuple[Schema, Callable[..., Any], dict[str, Any]]]) -> None:
    """Ask for all of it at once: what ends validates, and most ends."""

    def check(one: tuple[Schema, Callable[..., Any], dict[str, Any]]) -> int:
        schema, ask, body = one
        ended = [text for text, end in ask(server, body) if end == "stop"]
        for text in ended:
            if "~~" not in text:
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        return len(ended)

    with ThreadPoolExecutor(12) as threads:
        ended = sum(threads.map(check, asked))
    assert ended > len(asked) // 2  # most come to an end


HOSTILE: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(5000)}}},
    {"json": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}}},
    {"json": {"type": "array", "minItems": 10**9}},
    {"json": {"type": "string", "minLength": 10**6}},
    {"json": {"type": "string", "maxLength": 4096}},
    {"json": {"enum": [str(number) for number in range(100_000)]}},
    {"choice": [str(number) for number in range(100_000)]},
    {"choice": [f"choice {number}" for number in range(1024)]},
    {"json": {"not": {}}},
    {"json": {"$ref": "#"}},
    {"json": {"type": "integer", "minimum": 3, "maximum": 2}},
    {"json": {"allOf": [{"anyOf": [{"enum": [f"{i}{j}"]} for j in range(8)]} for i in range(8)]}},
    {"json": {"oneOf": [{"type": "object", "properties": {f"a{n}": {}}} for n in range(200)]}},
    {"regex": "((a{1,100}){1,100}){1,100}"},
    {"regex": ".{1,4000}x.{1,4000}"},
    {"regex": "(a+)+b"},
    {"regex": "(a?){200}a{200}"},
    {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    {"regex": ""},
    {"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
    {"grammar": "root ::= root root"},
    {"grammar": 'start: x\nx: x x | "a"'},
    {"structural_tag": {"format": {"type": "sequence", "elements": []}}},
    {"json": {"type": "string", "pattern": "\ud800"}},
]


def test_hostile_grammars_end_soon_and_harm_nobody(demo: LiveServer) -> None:
    first = {"prompt": "a", "structured_outputs": {"regex": "a"}}
    assert demo.post("/v1/completions", first).status_code == 200
    for hostile in HOSTILE:
        body = json.dumps({"prompt": "a", "max_tokens": 20, "structured_outputs": hostile})
        answer = demo.post("/v1/completions", body.encode())
        assert answer.status_code in (200, 400), (str(hostile)[:80], answer.text)
        if answer.status_code == 400:
            error = answer.json()["error"]
            assert error["message"] and "\n" not in error["message"] and len(error["message"]) <= 1000
    assert demo.post("/v1/completions", first).json()["choices"][0]["text"] == "a"
