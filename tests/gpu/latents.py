"""Rates of latent attention and of draws of tokens, each beside its floor."""

from collections.abc import Iterator

import numpy as np
import torch
from draws import make_draws
from latent_sizes import Sizes
from paged import make_step
from results import Result
from workbench import BF16, Workbench

from models.ops.latent_ops import pack_latent
from worker.kernels.compare_with_reference import moved
from worker.sampling.grouped_logits import BY_TORCH, GroupedLogits
from worker.sampling.top_k_top_p import Draws

_BLOCK = 64
DEEPSEEK = (Sizes(16, 512, 64, 128, 128), Sizes(128, 512, 64, 128, 128))
"""DeepSeek-V3 on each of eight ranks (and V2-Lite whole), and on one."""
TINY = (Sizes(2, 16, 4, 8, 8),)
DECODING, PROMPTS = ((1, 4096), (32, 4096), (128, 1024)), (512, 2048, 8192)
FILTERS = {"no filter": (0, 1.0), "top_k 50": (50, 1.0), "top_p 0.9": (0, 0.9)}


def measure_latents(bench: Workbench) -> Iterator[Result]:
    """Latent attention of decoding rows and of prompts, whose floors are the least reading and multiplying.

    The least for decoding rows is to compare queries with latents, and for prompts to make keys and values of
    all heads, which our kernel does not.
    """
    for sizes in DEEPSEEK if bench.on_card else TINY:
        for rows, length in bench.some(DECODING):
            count, tokens = bench.rows(rows), bench.tokens(length)
            took = _seconds(bench, sizes, [1] * count, [tokens] * count)
            absorbed = 2 * count * sizes.heads * _absorbed(sizes, tokens)
            read = count * tokens * (sizes.rank + sizes.rope) * BF16.itemsize
            share = bench.floor(read, absorbed) / took
            name = f"latents, {sizes.heads} heads, {rows} x {length}"
            yield Result(name, "", read / took / 1e12, "TB/s", share)
        for length in bench.some(PROMPTS):
            tokens = bench.tokens(length)
            took = _seconds(bench, sizes, [tokens], [tokens])
            wide = sizes.nope + sizes.rope + sizes.value
            made = tokens * sizes.rank * (sizes.nope + sizes.value)
            expanded = 2 * sizes.heads * (tokens * tokens // 2 * wide + made)
            name = f"latents, {sizes.heads} heads, prompt of {length}"
            yield bench.computing(name, expanded, took)


def _absorbed(sizes: Sizes, length: int) -> int:
    """The products of a head of one token which sees so many rows, if latents are not expanded."""
    return length * (2 * sizes.rank + sizes.rope) + sizes.rank * (sizes.nope + sizes.value)


def _seconds(bench: Workbench, sizes: Sizes, new: list[int], total: list[int]) -> float:
    step = moved(make_step(new, total, _BLOCK), bench.target)
    tokens, row = sum(new), sizes.rank + sizes.rope
    matrix = torch.randn(sizes.heads * (sizes.nope + sizes.value), sizes.rank) / sizes.rank**0.5
    up = pack_latent(matrix.to(BF16), sizes.heads, sizes.nope, sizes.rank).to(bench.target)
    q = bench.random(tokens, sizes.heads, sizes.nope + sizes.rope)
    latent = bench.random(tokens, row)
    cache = bench.random(step.block_table.numel(), _BLOCK, row)
    angles = torch.rand(tokens, sizes.rope // 2, device=bench.target)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    attend = bench.operations["latent_attention"]
    return bench.seconds_of(lambda: attend(q, latent, up, cache, step, cos_sin, scale=0.1))


def measure_draws(bench: Workbench) -> Iterator[Result]:
    """Draws from logits as sharp as a model's and from nearly flat ones, which are read once at least."""
    _ = bench.operations
    from worker.kernels.cuda.draw_kernel import draw

    width = bench.size(151_936, 300)
    for rows in bench.some((1, 32, 256)):
        count = bench.rows(rows)
        for kind, spread in bench.some((("sharp", 3.0), ("flat", 0.1))):
            logits = GroupedLogits(spread * torch.randn(count, width, device=bench.target), BY_TORCH)
            for name, (top_k, top_p) in FILTERS.items():
                wanted = _draws(bench, count, top_k, top_p)
                took = bench.seconds_of(lambda logits=logits, wanted=wanted: draw(logits, wanted))
                share = bench.floor(4 * count * width, 0) / took
                yield Result(f"draw, {rows} rows, {kind}, {name}", "", took * 1e6, "us", share)


def _draws(bench: Workbench, count: int, top_k: int, top_p: float) -> Draws:
    given = ([0.8] * count, [top_k] * count, [top_p] * count, [0.0] * count)
    return make_draws(np.full(count, 1 << 30), *given, bench.target)
