"""The figures of `make gpu-check` for latent attention and for draws of tokens, each beside its floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from latent_sizes import Sizes
from measures import Ceilings, Result, seconds_of
from paged import make_step

from models.ops.latent_reference import pack_latent
from worker.kernels import check
from worker.sampling.draw import Draw, Draws
from worker.sampling.groups import BY_TORCH, GroupedLogits

BF16 = torch.bfloat16
_BLOCK = 64
DEEPSEEK = (Sizes(16, 512, 64, 128, 128), Sizes(128, 512, 64, 128, 128))
"""DeepSeek-V3 on each of eight ranks (and V2-Lite whole), and on one."""
FILTERS = {"no filter": (0, 1.0), "top_k 50": (50, 1.0), "top_p 0.9": (0, 0.9)}


def measure_latent(
    attend: Callable[..., torch.Tensor],
    target: torch.device,
    ceilings: Ceilings,
    models: tuple[Sizes, ...] = DEEPSEEK,
    decoding: tuple[tuple[int, int], ...] = ((1, 4096), (32, 4096), (128, 1024)),
    prompts: tuple[int, ...] = (512, 2048, 8192),
) -> Iterator[Result]:
    """Latent attention of decoding rows and of prompts, whose floors are the least reading and multiplying.

    The least for decoding rows is to compare queries with latents, and for prompts to make keys and values of
    all heads.
    """
    for sizes in models:
        for count, length in decoding:
            took = _seconds(attend, target, sizes, [1] * count, [length] * count)
            absorbed = 2 * count * sizes.heads * _absorbed(sizes, length)
            read = count * length * (sizes.rank + sizes.rope) * BF16.itemsize
            floor = max(read / ceilings.bytes_per_second, absorbed / ceilings.operations_per_second)
            name = f"latents, {sizes.heads} heads, {count} x {length}"
            yield Result(name, "", read / took / 1e12, "TB/s", floor / took)
        for length in prompts:
            took = _seconds(attend, target, sizes, [length], [length])
            wide = sizes.nope + sizes.rope + sizes.value
            made = length * sizes.rank * (sizes.nope + sizes.value)
            expanded = 2 * sizes.heads * (length * length // 2 * wide + made)
            floor = expanded / ceilings.operations_per_second
            name = f"latents, {sizes.heads} heads, prompt of {length}"
            yield Result(name, "", expanded / took / 1e12, "TFLOP/s", floor / took)


def _absorbed(sizes: Sizes, length: int) -> int:
    """The products of a head of one token which sees so many rows, if latents are not expanded."""
    return length * (2 * sizes.rank + sizes.rope) + sizes.rank * (sizes.nope + sizes.value)


def _seconds(
    attend: Callable[..., torch.Tensor], target: torch.device, sizes: Sizes, new: list[int], total: list[int]
) -> float:
    step = check.moved(make_step(new, total, _BLOCK), target)
    tokens, row = sum(new), sizes.rank + sizes.rope
    matrix = torch.randn(sizes.heads * (sizes.nope + sizes.value), sizes.rank) / sizes.rank**0.5
    up = pack_latent(matrix.to(BF16), sizes.heads, sizes.nope, sizes.rank).to(target)
    q = torch.randn(tokens, sizes.heads, sizes.nope + sizes.rope, device=target).to(BF16)
    latent = torch.randn(tokens, row, device=target).to(BF16)
    cache = torch.randn(step.block_table.numel(), _BLOCK, row, device=target).to(BF16)
    angles = torch.rand(tokens, sizes.rope // 2, device=target)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    return seconds_of(lambda: attend(q, latent, up, cache, step, cos_sin, scale=0.1), target)


def measure_draws(
    draw: Draw,
    target: torch.device,
    ceilings: Ceilings,
    rows: tuple[int, ...] = (1, 32, 256),
    width: int = 151_936,
) -> Iterator[Result]:
    """Draws from logits as sharp as a model's and from nearly flat ones, which are read once at least."""
    for count in rows:
        for spread in (3.0, 0.1):
            logits = GroupedLogits(spread * torch.randn(count, width, device=target), BY_TORCH)
            for name, (top_k, top_p) in FILTERS.items():
                draws = _draws(count, top_k, top_p, target)
                took = seconds_of(lambda logits=logits, draws=draws: draw(logits, draws), target)
                share = 4 * count * width / ceilings.bytes_per_second / took
                kind = "sharp" if spread > 1 else "flat"
                yield Result(f"draw, {count} rows, {kind}, {name}", "", took * 1e6, "us", share)


def _draws(count: int, top_k: int, top_p: float, target: torch.device) -> Draws:
    def column(value: float, dtype: torch.dtype) -> Any:
        return torch.full((count, 1), value, dtype=dtype, device=target)

    return Draws(
        rows=torch.arange(count, dtype=torch.int32, device=target),
        temperature=column(0.8, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        min_p=column(0.0, torch.float32),
        points=column(1 << 30, torch.int32),
        largest_k=top_k,
        has_min_p_or_top_k=top_k > 0,
        has_top_p=top_p < 1,
        bounded=top_k > 0,
    )
