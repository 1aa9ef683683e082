"""What grammars cost beside the model: building, compiling, masks, reading calls, and hostile input.

    python tests/bench/grammars.py FOLDER [--schemas 200]

FOLDER is a checkpoint of `checkpoints.py`, of which only the tokenizer is read. Schemas are random: nested
objects with lists, enums, formats, patterns and bounds. Each is followed by an answer of random tokens that
it allows, and then by the same answer again, when its masks are known.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from engine_core.grammar.compiler import GrammarCompiler  # noqa: E402
from engine_core.grammar.matcher import GrammarError, TokenMatcher  # noqa: E402
from engine_core.protocol import Grammar  # noqa: E402
from server.answers.answer_reader import AnswerReader  # noqa: E402
from server.answers.dialects import DIALECTS_BY_NAME  # noqa: E402
from server.errors import BadRequest  # noqa: E402
from server.grammars.form_grammar import (  # noqa: E402
    AskedForm,
    StructuredOutputsParams,
    build_grammar,
)
from server.text.tokenizer_files import TokenizerFiles  # noqa: E402

LONGEST = 96
"""The most tokens of an answer."""
HOSTILE: dict[str, StructuredOutputsParams] = {
    "1,000 optional properties": StructuredOutputsParams(
        json={"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1000)}}
    ),
    "5,000 properties": StructuredOutputsParams(
        json={"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}
    ),
    "minItems 1e9": StructuredOutputsParams(json={"type": "array", "minItems": 10**9}),
    "minItems 4,096": StructuredOutputsParams(json={"type": "array", "minItems": 4096}),
    "maxLength 4,096": StructuredOutputsParams(json={"type": "string", "maxLength": 4096}),
    "choice of 1,024": StructuredOutputsParams(choice=[f"choice {i} of many" for i in range(1024)]),
    "nested 32 deep": StructuredOutputsParams(json=json.loads('{"items":' * 15 + "{}" + "}" * 15)),
    "nested 300 deep": StructuredOutputsParams(json=json.loads('{"items":' * 300 + "{}" + "}" * 300)),
    "not, of anything": StructuredOutputsParams(json={"not": {}}),
    "a reference to itself": StructuredOutputsParams(json={"$ref": "#"}),
    "((a{1,100}){1,100}){1,100}": StructuredOutputsParams(regex="((a{1,100}){1,100}){1,100}"),
    ".{1,4000}x.{1,4000}": StructuredOutputsParams(regex=".{1,4000}x.{1,4000}"),
    "allOf of 8 anyOf of 8": StructuredOutputsParams(
        json={"allOf": [{"anyOf": [{"minimum": 8 * i + k} for k in range(8)]} for i in range(8)]}
    ),
    "30,000 parentheses": StructuredOutputsParams(grammar="start: " + "(" * 15_000 + '"a"' + ")" * 15_000),
}


def random_schema(seed: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "enum", "pattern", "format", "bounded"]
    match seed.choice(["object"] if depth == 0 else kinds + ["object", "array"] * (depth < 4)):
        case "object":
            names = [f"{seed.choice(['name', 'size', 'kind', 'note', 'tag'])}_{i}" for i in range(2 + depth)]
            properties = {name: random_schema(seed, depth + 1) for name in names}
            required = [name for name in names if seed.random() < 0.6]
            return {"type": "object", "properties": properties, "required": required}
        case "array":
            return {"type": "array", "items": random_schema(seed, depth + 1), "maxItems": seed.randint(1, 9)}
        case "enum":
            return {"enum": [f"value {seed.randint(0, 99)}" for _ in range(seed.randint(2, 9))]}
        case "pattern":
            return {"type": "string", "pattern": seed.choice(["^[a-z]{3,9}$", "^[A-Z][0-9]+-[0-9]{4}$"])}
        case "format":
            return {"type": "string", "format": seed.choice(["date", "email", "uuid", "ipv4", "date-time"])}
        case "bounded":
            return {"type": "integer", "minimum": seed.randint(-9, 0), "maximum": seed.randint(1, 10**6)}
        case kind:
            return {"type": kind}


def milliseconds(work: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    found = work()
    return found, 1000 * (time.perf_counter() - begin)


def told(what: str, times: list[float]) -> None:
    last = quantiles(times, n=100)[98]
    print(f"{what}: mean {fmean(times):.3f}, p50 {median(times):.3f}, p99 {last:.2f}, most {max(times):.2f}")


def follow(
    matcher: TokenMatcher, size: int, tokens: list[int] | None, seed: random.Random
) -> tuple[list[int], list[float]]:
    """Follow a text, or random tokens that are allowed; returns them, and the time of each mask."""
    written: list[int] = []
    masks: list[float] = []
    while not matcher.complete and len(written) < LONGEST:
        bound, spent = milliseconds(matcher.bound)
        masks.append(spent)
        if tokens is None:
            bits = np.frombuffer(bound.data, np.uint8)
            token = int(seed.choice(np.flatnonzero(np.unpackbits(bits, bitorder="little")[:size]).tolist()))
        elif len(written) < len(tokens):
            token = tokens[len(written)]
        else:
            break
        matcher.take(token)
        written.append(token)
    return written, masks


def measure_schemas(compiler: GrammarCompiler, size: int, count: int) -> None:
    seed = random.Random(7)
    times: dict[str, list[float]] = {}

    def timed(what: str, work: Callable[..., Any], *given: Any) -> Any:
        found, spent = milliseconds(lambda: work(*given))
        times.setdefault(what, []).append(spent)
        return found

    for _ in range(count):
        asked = AskedForm(StructuredOutputsParams(json=random_schema(seed)), "schema")
        built = timed("building and checking, ms", build_grammar, asked, {})
        grammar = Grammar(built.kind, built.text)
        compiled = timed(
            "compiling and first mask, ms", lambda given: compiler.compile(given).result(), grammar
        )
        matcher = timed("matcher of a known grammar, ms", compiler.matcher, compiled, grammar)
        written, new = follow(matcher, size, None, seed)
        _, known = follow(compiler.matcher(compiled, grammar), size, written, seed)
        times.setdefault("mask of a new schema, ms", []).extend(new)
        times.setdefault("mask of a known schema, ms", []).extend(known)
    for what, spent in times.items():
        told(what, spent)


def measure_hostile(compiler: GrammarCompiler, size: int) -> None:
    for name, params in HOSTILE.items():
        begin = time.perf_counter()
        try:
            built = build_grammar(AskedForm(params, "schema"), {})
            grammar = Grammar(built.kind, built.text)
            matcher = compiler.matcher(compiler.compile(grammar).result(), grammar)
            worst = max(follow(matcher, size, None, random.Random(1))[1])
            outcome = f"followed, worst mask {worst:.1f} ms"
        except (BadRequest, GrammarError) as error:
            outcome = f"refused: {str(error)[:70]}"
        print(f"hostile: {name}: {1000 * (time.perf_counter() - begin):.0f} ms, {outcome}")


def measure_reading() -> None:
    """The time of a piece of an answer of text and calls, in pieces as tokens are long."""
    arguments = json.dumps({"city": "Rome", "note": 'a "quoted" text \n ' * 5, "days": [1, 2, 3]})
    call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>\n'
    text = ("Some words of an answer that ends in a call. " * 20 + call) * 50
    pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
    reader = AnswerReader(DIALECTS_BY_NAME["hermes"], None, tools={"f": {"type": "object"}})
    _, spent = milliseconds(lambda: [reader.push(piece) for piece in pieces])
    print(f"reading: {1000 * spent / len(pieces):.1f} us a piece of 4 characters")
    _, spent = milliseconds(lambda: reader.push("<tool_call" * 20_000))
    print(f"reading 200,000 hostile characters: {spent:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what grammars cost.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schemas", type=int, default=200)
    asked = parser.parse_args()
    tokenizer = TokenizerFiles(str(asked.folder), "").load()
    size = tokenizer.largest_id + 1
    begin = time.perf_counter()
    spelling = tokenizer.spelling([])
    print(f"spelling {size} tokens: {time.perf_counter() - begin:.2f} s")
    compiler = GrammarCompiler(spelling, size, str(asked.folder), lambda: None)
    _, spent = milliseconds(lambda: compiler.compile(Grammar("regex", "a")).result())
    print(f"the vocabulary, once: {spent / 1000:.2f} s")
    measure_schemas(compiler, size, asked.schemas)
    measure_hostile(compiler, size)
    measure_reading()
    compiler.stop()


if __name__ == "__main__":
    main()
