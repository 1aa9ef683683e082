"""Recorded outputs of nine families of models, of the package canitoolcall, and how our readers read them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import accumulate, pairwise

from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.results import ParsedToolCall, ParseResult
from spelled import demo_tokenizer

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
def format_of(model: str, markers: tuple[str, ...] = ()) -> AnswerFormat:
    """The format of a model's answers: these markers are tokens behind the demo's, others are text."""
    calls, thinking = next(row[1:] for row in PARSERS if model.startswith(row[0]))
    dialect, first = dialect_named(calls), demo_tokenizer().largest_id + 1
    tokens = {marker: first + number for number, marker in enumerate(markers)}
    return format_with(dialect, thinking_named(thinking), tokens, dialect.opens[0] if dialect else "")


def tools_of(fixture: Fixture) -> Mapping[str, Schema]:
    functions = [tool.get("function", tool) for tool in fixture.tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def reader_of(
    fixture: Fixture, format: AnswerFormat | None = None, *, holds_calls: bool = True
) -> AnswerReader:
    format = format or format_of(fixture.reference_model)
    reference = FAMILIES[fixture.family].reference_for(fixture.reference_model)
    prompt = fixture.generation_prompt or (reference and reference.default_generation_prompt) or ""
    return AnswerReader(
        format.dialect,
        format.thinking,
        tools=tools_of(fixture),
        is_thinking=format.begins_thinking(prompt),
        written=format.written,
        holds_calls=holds_calls,
    )


def as_tokens(fixture: Fixture, format: AnswerFormat) -> Iterator[str]:
    """The pieces of a recorded text that the detokenizer makes of each of its tokens."""
    tokenizer, ids = demo_tokenizer(), format.tokens
    by_text = {format.written[mark]: id for mark, id in ids.items()}
    state = tokenizer.text_state((), marks=format.marks)
    for piece in re.split("(" + "|".join(map(re.escape, by_text)) + ")", fixture.raw_output):
        tokens = [by_text[piece]] if piece in by_text else tokenizer.encode(piece, add_special_tokens=False)
        yield from (state.push([token]) for token in tokens)
    yield state.flush()


def mutated(text: str, markers: Iterable[str], rng: random.Random) -> str:
    """The text with one of its markers lost, doubled, cut or moved, or with its end lost from there on."""
    places = [found.span() for found in re.finditer("|".join(map(re.escape, markers)), text)]
    if not places:
        return text
    start, end = rng.choice(places)
    before, marker, behind = text[:start], text[start:end], text[end:]
    match rng.randrange(5):
        case 0:
            return before + behind
        case 1:
            return before + marker + marker + behind
        case 2:
            return before + marker[: rng.randrange(1, len(marker) + 1)] + behind
        case 3:
            return before + marker[: rng.randrange(len(marker) + 1)]
        case _:
            to = rng.choice([at for at in range(len(text) + 1) if not any(a < at < b for a, b in places)])
            if to <= start:
                return text[:to] + marker + text[to:start] + behind
            return before + text[end:to] + marker + text[to:]


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
