"""Recorded outputs of nine families of models, of the package canitoolcall, and how our readers read them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import accumulate, pairwise

from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.results import ParsedToolCall, ParseResult

from server.output_parsing.answer_format import AnswerFormat, format_with
from server.output_parsing.answer_reader import AnswerReader
from server.output_parsing.formats.call_format import Schema
from server.output_parsing.tool_call_dialects import dialect_named, thinking_named
from server.output_parsing.unread_text import AnswerPart, Arguments, CallBegun, Reasoning, Text

PARSERS = (
    ("Qwen/Qwen3-Coder", "qwen3_coder", "none"),
    ("Qwen/Qwen3-4B-Instruct", "hermes", "none"),
    ("Qwen/Qwen3-", "hermes", "qwen3"),
    ("Qwen/Qwen3.", "qwen3_coder", "qwen3"),
    ("deepseek-ai/DeepSeek-V3-", "deepseek_v3", "none"),
    ("deepseek-ai/DeepSeek-V3.1", "deepseek_v31", "deepseek_v3"),
    ("deepseek-ai/DeepSeek-V3.2", "deepseek_v32", "deepseek_v3"),
    ("deepseek-ai/DeepSeek-V4-", "deepseek_v4", "deepseek_v3"),
    ("deepseek-ai/DeepSeek-V4.1", "deepseek_v41", "deepseek_v3"),
    ("google/gemma-4", "gemma4", "gemma4"),
    ("zai-org/GLM-4.5", "glm45", "glm45"),
    ("zai-org/GLM", "glm47", "glm45"),
    ("openai/gpt-oss", "openai", "openai_gptoss"),
    ("moonshotai/Kimi-K2-Instruct", "kimi_k2", "none"),
    ("moonshotai/Kimi-K2", "kimi_k2", "kimi_k2"),
    ("moonshotai/Kimi-K3", "kimi_k3", "kimi_k3"),
    ("meta-llama/Llama-3", "llama3_json", "none"),
    ("meta-llama/Llama-4", "llama4_pythonic", "none"),
    ("mistralai/Magistral-Small-2506", "mistral", "qwen3"),
    ("mistralai/Magistral", "mistral", "mistral"),
    ("mistralai/Ministral-3-14B-Reasoning", "mistral", "mistral"),
    ("mistralai/", "mistral", "none"),
)
"""The beginnings of models' names, and the parsers of their calls and of their reasoning."""

FIXTURES = load_fixtures()
FAMILIES = load_families()


@cache
def format_of(model: str) -> AnswerFormat:
    """The format of a model's answers, with all markers as text."""
    calls, thinking = next(row[1:] for row in PARSERS if model.startswith(row[0]))
    dialect = dialect_named(calls)
    return format_with(dialect, thinking_named(thinking), {}, dialect.opens[0] if dialect else "")


def tools_of(fixture: Fixture) -> Mapping[str, Schema]:
    functions = [tool.get("function", tool) for tool in fixture.tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def reader_of(fixture: Fixture, *, holds_calls: bool = True) -> AnswerReader:
    model = fixture.reference_model
    format, reference = format_of(model), FAMILIES[fixture.family].reference_for(model)
    prompt = fixture.generation_prompt or (reference and reference.default_generation_prompt) or ""
    return AnswerReader(
        format.dialect,
        format.thinking,
        tools=tools_of(fixture),
        is_thinking=format.begins_thinking(prompt),
        holds_calls=holds_calls,
    )


def parts_of(reader: AnswerReader, pieces: Iterable[str]) -> list[AnswerPart]:
    parts = [part for piece in pieces for part in reader.push(piece)]
    return [*parts, *reader.finish()]


def result_of(parts: Iterable[AnswerPart]) -> ParseResult:
    """The parts as a client of OpenAI's adds them up."""
    text, reasoning, calls = "", "", list[tuple[str, str]]()
    for part in parts:
        match part:
            case Text(more):
                text += more
            case Reasoning(more):
                reasoning += more
            case CallBegun(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case Arguments(index, more):
                calls[index] = calls[index][0], calls[index][1] + more
            case _:
                pass
    return ParseResult(text or None, reasoning or None, tuple(ParsedToolCall(*call) for call in calls))


def cut(text: str, rng: random.Random, longest: int = 12) -> Iterator[str]:
    """A text in random pieces."""
    ends = accumulate(rng.randint(1, longest) for _ in range(len(text)))
    places = [0, *(end for end in ends if end < len(text)), len(text)]
    return (text[start:end] for start, end in pairwise(places))
