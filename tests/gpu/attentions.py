"""Rates of attention, and of norms: decoding rows read the cache, prompts multiply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from paged import make_step
from results import Result
from workbench import BF16, Workbench

from models.context import ForwardContext
from models.ops import reference
from worker.kernels.compare_with_reference import moved

_BLOCK = 64
DECODING = ((1, 1024), (1, 16_384), (32, 2048), (256, 1024))
PROMPTS = (512, 2048, 8192)


@dataclass(frozen=True)
class _Heads:
    """Heads of Llama-3.1-8B, or small ones."""

    queries: int
    keys: int
    dim: int

    @classmethod
    def of(cls, bench: Workbench) -> _Heads:
        return cls(32, 8, 128) if bench.on_card else cls(4, 2, 16)

    def read(self, tokens: int, itemsize: int = 2) -> int:
        """Bytes of keys and values of so many tokens."""
        return 2 * tokens * self.keys * self.dim * itemsize

    def computed(self, length: int) -> int:
        """Operations of a prompt of which each token sees those before it."""
        return 2 * length**2 * self.queries * self.dim


def _step(bench: Workbench, new: list[int], total: list[int], *, in_order: bool = False) -> ForwardContext:
    step = moved(make_step(new, total, _BLOCK), bench.target)
    if not in_order:
        return step
    table = torch.arange(step.block_table.numel(), dtype=torch.int32, device=bench.target)
    return replace(step, block_table=table.view(step.block_table.shape))


def _seconds(bench: Workbench, step: ForwardContext, cached: torch.dtype = BF16) -> float:
    """The seconds of attention of a step over a cache of this number type."""
    heads = _Heads.of(bench)
    shape = (2, step.block_table.numel(), heads.keys, step.block_size, heads.dim)
    kv = torch.randn(shape, device=bench.target, dtype=BF16).to(cached)
    q = bench.random(len(step.positions), heads.queries, heads.dim)
    attend = bench.operations["attention"]
    return bench.seconds_of(lambda: attend(q, kv, step, scale=0.1))


def _decoding(bench: Workbench, rows: int, length: int, *, in_order: bool = False) -> ForwardContext:
    rows, length = bench.rows(rows), bench.tokens(length)
    return _step(bench, [1] * rows, [length] * rows, in_order=in_order)


def measure_attention(bench: Workbench) -> Iterator[Result]:
    """Attention of decoding rows in bytes, of prompts and texts in products."""
    heads = _Heads.of(bench)
    for rows, length in bench.some(DECODING):
        step = _decoding(bench, rows, length)
        read = heads.read(sum(step.kv_lens_host))
        yield bench.bandwidth(f"decoding, {rows} x {length}", read, _seconds(bench, step))
    rows, length = 32, 2048
    step = _decoding(bench, rows, length, in_order=True)
    read = heads.read(sum(step.kv_lens_host))
    yield bench.bandwidth(f"decoding, {rows} x {length}, blocks in order", read, _seconds(bench, step))
    for length in bench.some(PROMPTS):
        count = bench.tokens(length)
        took = _seconds(bench, _step(bench, [count], [count]))
        yield bench.computing(f"prompt of {length}", heads.computed(count), took)
    rows, count = bench.rows(32), bench.tokens(2048)
    step = _step(bench, [*[1] * rows, count], [count] * (rows + 1))
    floor = bench.floor(heads.read(rows * count), 0) + bench.floor(0, heads.computed(count))
    took = _seconds(bench, step)
    yield Result("prompt of 2048 beside 32 decoding rows", "", took * 1e6, "us", floor / took)


def measure_texts(bench: Workbench) -> Iterator[Result]:
    """Attention of encoders, in which each token sees all of its text."""
    heads = _Heads.of(bench)
    attend = bench.operations["encoder_attention"]
    for texts, length in bench.some(((64, 128), (64, 512))):
        rows, count = bench.rows(texts), bench.tokens(length)
        step = _step(bench, [count] * rows, [count] * rows)
        q, k, v = (bench.random(rows * count, number, heads.dim) for number in (heads.queries,) * 3)
        took = bench.seconds_of(lambda q=q, k=k, v=v, step=step: attend(q, k, v, step, scale=0.1))
        yield bench.computing(f"texts, {texts} x {length}", 2 * rows * heads.computed(count), took)


def measure_small_cache(bench: Workbench) -> Iterator[Result]:
    """Attention of decoding rows over a cache of 8 bits."""
    cached = torch.float8_e4m3fn if bench.card.capability >= 89 else torch.float8_e5m2
    heads = _Heads.of(bench)
    for rows, length in bench.some(((32, 2048), (256, 1024))):
        step = _decoding(bench, rows, length)
        read = heads.read(sum(step.kv_lens_host), 1)
        name = f"decoding, {rows} x {length}, {str(cached).removeprefix('torch.')}"
        yield bench.bandwidth(name, read, _seconds(bench, step, cached))


def measure_norms(bench: Workbench) -> Iterator[Result]:
    """Norms of a sum, by our kernel and by torch."""
    for tokens in bench.some((256, 8192)):
        x = bench.random(bench.tokens(tokens), bench.size(4096, 64))
        weight = torch.ones(x.shape[1], device=bench.target)
        for name, norm in (
            ("ours", bench.operations["add_rms_norm"]),
            ("torch's", reference.add_rms_norm),
        ):
            took = bench.seconds_of(lambda norm=norm, x=x, weight=weight: norm(x, x, weight, 1e-6))
            yield bench.bandwidth(f"norm of a sum of {tokens} rows, {name}", 3 * x.nbytes, took)


def measure_tiles(bench: Workbench) -> Iterator[Result]:
    """Attention with other tiles and splits than those that are chosen."""
    heads = _Heads.of(bench)
    with _choices(bench) as (tiles, splits):
        for shown in bench.some(((128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 8, 3), (64, 64, 4, 3))):
            count = bench.tokens(8192)
            with tiles(shown, short=False):
                took = _seconds(bench, _step(bench, [count], [count]))
            yield bench.computing(f"prompt of 8192, tiles {shown}", heads.computed(count), took)
        for shown in bench.some(((16, 64, 4, 3), (16, 32, 4, 4), (16, 128, 4, 2))):
            with tiles(shown, short=True):
                step = _decoding(bench, 32, 2048)
                took = _seconds(bench, step)
            yield bench.bandwidth(
                f"decoding, 32 x 2048, tiles {shown}", heads.read(sum(step.kv_lens_host)), took
            )
        for rows, length in bench.some(((1, 16_384), (32, 2048))):
            for count in bench.some((1, 2, 4, 8, 16, 32)):
                with splits(count):
                    step = _decoding(bench, rows, length)
                    took = _seconds(bench, step)
                name = f"decoding, {rows} x {length}, {count} splits"
                yield bench.bandwidth(name, heads.read(sum(step.kv_lens_host)), took)


@contextmanager
def _choices(bench: Workbench) -> Iterator[tuple[Callable[..., Any], Callable[[int], Any]]]:
    """Functions that replace the tiles of attention, and the splits of decoding rows, within a block."""
    _ = bench.operations
    from worker.kernels.cuda import attention_plan
    from worker.kernels.cuda.capabilities import Tiles

    chosen = attention_plan.attention_tiles

    def tiles(shown: tuple[int, int, int, int], *, short: bool) -> Any:
        def choose(*arguments: Any, **options: Any) -> Tiles:
            return Tiles(*shown) if options["short"] == short else chosen(*arguments, **options)

        return patch.object(attention_plan, "attention_tiles", choose)

    def splits(count: int) -> Any:
        return patch.object(
            attention_plan, "keys_of_split", lambda total, rows, *_: -(-total // rows // count)
        )

    yield tiles, splits
