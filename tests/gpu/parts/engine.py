"""Models with random weights in a worker alone: decoding, prompts, embeddings, and the time to ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from dummy import DRAWN, GREEDY, Dummy, measure_idle_share, opened
from ready import measure_ready
from results import Result
from shapes import INT4, Shape
from workbench import Part, Workbench

_ROWS = (1, 32, 256)
_CONTEXT, _LONG = 512, 2048
_STEPS = 50
_ROOM = 192
"""Tokens that a sequence may have beyond those it begins with."""
_SHARE, _BESIDE = 0.92, 4 << 30
"""The part of a card's memory that a worker takes, and what it needs beside weights and cache."""


def measure_model(bench: Workbench, name: str, first_token: int) -> Iterator[Result]:
    """Decoding, greedy and drawn, and prompts. `first_token`: the prompt whose first token is timed."""
    shape = bench.shape(name)
    most, longest = bench.rows(max(_ROWS)), bench.tokens(8192) + _ROOM
    long_rows = _fitting(bench, shape, most, _LONG)
    blocks = max(_blocks(bench, long_rows, _LONG), _blocks(bench, most, _CONTEXT))
    with opened(bench, shape, rows=most, longest=longest, blocks=blocks) as dummy:
        dummy.make_graphs()
        dummy.clear()
        for rows in _ROWS:
            result, step, host = _decoding(dummy, name, rows, _CONTEXT, 2)
            yield result
            if rows == 1:
                yield from measure_idle_share(dummy, f"{rows} x {_CONTEXT}", bench.rows(rows), step, host)
            drawn, _ = dummy.decode(bench.rows(rows), bench.tokens(_CONTEXT), _steps(bench), DRAWN)
            yield Result(f"{name} drawing, {rows} x {_CONTEXT}", "", step / drawn, "of decoding")
        yield _decoding(dummy, name, max(_ROWS), _LONG, 2, fitting=long_rows)[0]
        for length in (512, 2048, 8192):
            yield _prompt(dummy, name, length)
        yield _first_token(dummy, name, first_token)


def _blocks(bench: Workbench, rows: int, length: int) -> int:
    """The blocks for so many rows of this length, and for a prompt of 8192."""
    size = 64 if bench.on_card else 32
    return rows * -(-(bench.tokens(length) + _ROOM) // size) + -(-(bench.tokens(8192) + _ROOM) // size)


def _fitting(
    bench: Workbench, shape: Shape, rows: int, length: int, itemsize: int = 2, bits: float = 16
) -> int:
    """As many of these rows as fit on the card beside the weights, if not all do."""
    if not bench.on_card:
        return rows
    weights = shape.body * bits / 8 + (2 if shape.tied else 4) * shape.head
    free = _SHARE * torch.cuda.mem_get_info(bench.target)[1] - weights - _BESIDE
    each = (length + _ROOM) * shape.cached(itemsize)
    return min(rows, int(free / each) // 32 * 32)


def _steps(bench: Workbench) -> int:
    return bench.size(_STEPS, 3)


def _decoding(
    dummy: Dummy,
    name: str,
    rows: int,
    length: int,
    itemsize: int,
    bits: float = 16,
    fitting: int | None = None,
) -> tuple[Result, float, float]:
    """The rate of rows that decode, beside reading weights and cache -> it, and the seconds of step and host.

    `itemsize`: bytes of a number in the cache; `bits`: of one in the layers; `fitting`: rows that fit.
    """
    bench, shape = dummy.bench, dummy.shape
    count, tokens = bench.rows(rows) if fitting is None else fitting, bench.tokens(length)
    told = f"by {count} rows, which fit on the card" if count < bench.rows(rows) else ""
    step, host = dummy.decode(count, tokens, _steps(bench), GREEDY)
    read = shape.body * bits / 8 + 2 * shape.head + count * tokens * shape.cached(itemsize)
    share = bench.floor(read, 2 * count * (shape.body + shape.head)) / step
    return Result(f"{name} decoding, {rows} x {length}", told, count / step, "tok/s", share), step, host


def _prompt(dummy: Dummy, name: str, length: int) -> Result:
    bench, tokens = dummy.bench, dummy.bench.tokens(length)
    took = bench.median_of(partial(dummy.prompt, tokens), 5)
    floor = bench.floor(0, 2 * dummy.shape.body * tokens)
    return Result(f"{name} prompt of {length}", "", tokens / took, "tok/s", floor / took)


def _first_token(dummy: Dummy, name: str, length: int) -> Result:
    bench = dummy.bench
    took = bench.median_of(partial(dummy.prompt, bench.tokens(length)))
    return Result(f"{name} prompt of {length}, to its token", "idle before", 1e3 * took, "ms")


def measure_variant(
    bench: Workbench,
    kind: str,
    cases: tuple[tuple[int, int], ...],
    *,
    itemsize: int = 2,
    bits: float = 16,
    saved: dict[str, Any] | None = None,
    on_card: dict[str, str] | None = None,
) -> Iterator[Result]:
    """Decoding and a prompt of the 8B model in another form. `on_card`: options that a CPU does not know."""
    shape, name = bench.shape("8B"), f"8B {kind}"
    options = (on_card or {}) if bench.on_card else {}
    most, longest = bench.rows(max(rows for rows, _ in cases)), bench.tokens(8192) + _ROOM
    fitting = [_fitting(bench, shape, bench.rows(rows), length, itemsize, bits) for rows, length in cases]
    blocks = max(_blocks(bench, rows, length) for rows, (_, length) in zip(fitting, cases, strict=True))
    sizes: dict[str, Any] = {"rows": most, "longest": longest, "blocks": blocks}
    with opened(bench, shape, saved=saved, **sizes, **options) as dummy:
        dummy.make_graphs()
        dummy.clear()
        for count, (rows, length) in zip(fitting, cases, strict=True):
            yield _decoding(dummy, name, rows, length, itemsize, bits, count)[0]
        yield _prompt(dummy, name, 2048)


def measure_texts(bench: Workbench, name: str, texts: int, length: int) -> Iterator[Result]:
    """Embeddings: many texts in a step, and one short text."""
    shape = bench.shape(name)
    count, tokens = bench.rows(texts), bench.tokens(length)
    with opened(
        bench,
        shape,
        rows=count,
        longest=bench.size(512, 64),
        pools=True,
        max_num_batched_tokens=max(count * tokens, 512),
    ) as dummy:
        dummy.make_graphs()
        took = bench.median_of(partial(dummy.embed, count, tokens))
        floor = bench.floor(0, 2 * shape.body * count * tokens)
        yield Result(
            f"{name} embeddings, {texts} x {length}", "", count * tokens / took, "tok/s", floor / took
        )
        took = bench.median_of(partial(dummy.embed, 1, bench.tokens(32)), 20)
        yield Result(f"{name} one text of 32", "token ids, in process", 1e3 * took, "ms")


Work = Callable[[Workbench], Iterator[Result]]
_PLAIN: dict[str, Work] = {
    "8B": partial(measure_model, name="8B", first_token=512),
    "0.6B": partial(measure_model, name="0.6B", first_token=128),
    "0.6B embeddings": partial(measure_texts, name="0.6B", texts=64, length=512),
    "MiniLM embeddings": partial(measure_texts, name="MiniLM", texts=64, length=128),
}
_VARIANTS: dict[str, Work] = {
    "8B with fp8 cache": partial(
        measure_variant,
        kind="with fp8 cache",
        cases=((256, _LONG),),
        itemsize=1,
        on_card={"kv_cache_dtype": "fp8"},
    ),
    "8B in fp8": partial(
        measure_variant,
        kind="in fp8",
        cases=((1, _CONTEXT), (256, _CONTEXT)),
        bits=8,
        on_card={"quantization": "fp8"},
    ),
    "8B in W4A16": partial(measure_variant, kind="in W4A16", cases=((1, _CONTEXT),), bits=4.125, saved=INT4),
}

PARTS = (
    *(Part(name, work, 50) for name, work in _PLAIN.items()),
    Part("0.6B ready", partial(measure_ready, name="0.6B"), 75, fresh=True),
    *(Part(name, work, 35) for name, work in _VARIANTS.items()),
    Part("8B ready", partial(measure_ready, name="8B"), 80, fresh=True),
)
