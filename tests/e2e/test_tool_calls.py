"""Calls that are required of a model which has never seen one, through OpenAI's client and a live server."""

import json
import re
from typing import Any

import jsonschema
import openai
import pytest
from live import serving

MESSAGES: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"enum": ["wind", "rain"]}, "maxItems": 3},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days", "unit", "place"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}, "y": {"type": "null"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "stop": NOTHING}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]


def ask(client: openai.OpenAI, **body: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=MESSAGES, **body).choices


def check(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.turns(2)
@pytest.mark.parametrize("seed", range(4))
def test_required_calls_are_right(client: openai.OpenAI, seed: int) -> None:
    drawn = {"seed": seed, "n": 2, "temperature": 1.5, "parallel_tool_calls": bool(seed % 2)}
    for choice in ask(client, tools=TOOLS, tool_choice="required", max_tokens=500, **drawn):
        calls = choice.message.tool_calls
        assert calls and (seed % 2 or len(calls) == 1)
        assert choice.finish_reason in ("tool_calls", "length")
        for call in calls if choice.finish_reason == "tool_calls" else calls[:-1]:
            check(call.function.name, call.function.arguments)


PLAN: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "wind": {"type": "boolean"}, "at": {"enum": [1, "noon"]}},
    "required": ["unit", "wind", "at"],
    "additionalProperties": False,
}


@pytest.mark.turns(16)
@pytest.mark.parametrize(
    "dialect",
    ["qwen3_coder", "pythonic", "mistral", "deepseek_v31", "minimax_m3", "openai", "gemma4", "kimi_k2"],
)
def test_each_kind_of_dialect_is_written_by_a_model_that_does_not_know_it(dialect: str) -> None:
    with (
        serving("demo", "--dtype", "float32", "--tool-call-parser", dialect) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        tools = [{"type": "function", "function": {"name": "plan", "parameters": PLAN}}]
        single = {"parallel_tool_calls": False, "n": 4, "seed": 3, "max_tokens": 300}
        choices = ask(client, tools=tools, tool_choice="required", **single)
    for choice in choices:
        [call] = choice.message.tool_calls or []
        assert choice.finish_reason == "tool_calls" and call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), PLAN)


LINES = """
start: "*** Begin" LF line~1..3 "*** End"
line: ("+" | "-" | "\\"") /[a-z\\\\]{0,4}/ LF
%import common.LF
"""


@pytest.mark.turns
@pytest.mark.parametrize("choice", ["required", {"type": "custom", "custom": {"name": "patch"}}])
def test_the_input_of_a_custom_tool_follows_its_grammar(client: openai.OpenAI, choice: Any) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": LINES}}
    tools: Any = [{"type": "custom", "custom": {"name": "patch", "format": grammar}}]
    for seed in range(3):
        drawn = {"seed": seed, "temperature": 1.5, "parallel_tool_calls": False, "max_tokens": 200}
        [answer] = ask(client, tools=tools, tool_choice=choice, **drawn)
        [call] = answer.message.tool_calls or []
        assert call.type == "custom"
        assert re.fullmatch(r'\*\*\* Begin\n([-+"][a-z\\]{0,4}\n){1,3}\*\*\* End', call.custom.input), (
            call.custom.input
        )
