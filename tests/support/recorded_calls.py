"""Recorded outputs of nine families of models, from the package canitoolcall, read by our readers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from canitoolcall.checks import case_status, run_checks
from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.results import CheckResult, Observation, ParsedToolCall, ParseResult, Status

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
"""The beginning of a model's name, and its parsers of calls and of reasoning."""

FIXTURES = load_fixtures()
FAMILIES = load_families()


def format_of(fixture: Fixture) -> AnswerFormat:
    """The format of the answers of a fixture's model."""
    calls, thinking = next(p[1:] for p in PARSERS if fixture.reference_model.startswith(p[0]))
    dialect = dialect_named(calls)
    return format_with(dialect, thinking_named(thinking), {}, dialect.opens[0] if dialect else "")


def reader_of(fixture: Fixture, format: AnswerFormat) -> AnswerReader:
    tools: dict[str, Schema] = {}
    for tool in fixture.tools:
        function = tool.get("function", tool)
        tools[function["name"]] = function.get("parameters") or {}
    model = FAMILIES[fixture.family].reference_for(fixture.reference_model)
    prompt = fixture.generation_prompt or (model and model.default_generation_prompt)
    return AnswerReader(
        format.dialect,
        format.thinking,
        tools=tools,
        is_thinking=format.begins_thinking(prompt or ""),
        written=format.written,
    )


def result_of(parts: Iterable[AnswerPart]) -> ParseResult:
    text, reasoning = "", ""
    names: list[str] = []
    arguments: list[str] = []
    for part in parts:
        match part:
            case Text(more):
                text += more
            case Reasoning(more):
                reasoning += more
            case CallBegun(_, name):
                names.append(name)
                arguments.append("")
            case Arguments(index, more):
                arguments[index] += more
            case _:
                pass
    calls = tuple(map(ParsedToolCall, names, arguments))
    return ParseResult(text or None, reasoning or None, calls)


def replay(fixture: Fixture, pieces: Iterable[str]) -> ParseResult:
    reader = reader_of(fixture, format_of(fixture))
    parts = [part for piece in pieces for part in reader.push(piece)]
    return result_of([*parts, *reader.finish()])


def cuts_of(text: str, seed: int, longest: int = 12) -> Iterator[str]:
    rng = random.Random(seed)
    while text:
        length = rng.randint(1, longest)
        yield text[:length]
        text = text[length:]


def observed(fixture: Fixture) -> Observation:
    text = fixture.raw_output
    streams = {"token": replay(fixture, text), "one": replay(fixture, [text])}
    streams |= {f"rand:{seed}:8": replay(fixture, cuts_of(text, seed)) for seed in range(2)}
    return Observation(nonstream=replay(fixture, [text]), streams=streams)


def judged(fixture: Fixture) -> tuple[Status, list[CheckResult]]:
    rows = run_checks(fixture, FAMILIES[fixture.family], observed(fixture))
    return case_status(rows), rows
