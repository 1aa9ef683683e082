"""Steps over a paged cache in which every key that no sequence owns is NaN, or has a scale that is."""

import torch
from torch import Tensor

from models.context import ForwardContext
from models.ops.attention_inputs import CODES, rounded, stored_shape

STEPS = [
    ([1], [1]),
    ([1], [700]),  # threads share its chunks
    ([70], [70]),
    ([130], [500]),
    ([1, 2, 33, 64, 1], [20, 2, 90, 64, 300]),  # all kinds in one step
]
"""New tokens and all tokens of the rows of steps."""


def make_step(new: list[int], total: list[int], block_size: int) -> ForwardContext:
    """A step in which row b computes the last `new[b]` of its `total[b]` tokens. No blocks are shared."""
    width = -(-max(total) // block_size)
    blocks = torch.randperm(len(new) * width).view(len(new), width).int()
    positions = [torch.arange(t - n, t) for n, t in zip(new, total, strict=True)]
    slots = [
        table[p // block_size].long() * block_size + p % block_size
        for table, p in zip(blocks, positions, strict=True)
    ]
    return ForwardContext(
        positions=torch.cat(positions),
        query_starts=torch.tensor([0, *new]).cumsum(0, dtype=torch.int32),
        kv_lens=torch.tensor(total, dtype=torch.int32),
        block_table=blocks,
        slot_mapping=torch.cat(slots),
        block_size=block_size,
        query_lens_host=new,
        kv_lens_host=total,
    )


def unfit(dtype: torch.dtype) -> float:
    """What makes rows of a cache NaN if it is written all over them."""
    return -1 if dtype == CODES else torch.nan


def make_cache(step: ForwardContext, kv_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """A cache that is filled up to the end of each sequence."""
    blocks, size = step.block_table.numel(), step.block_size
    kv = torch.full(stored_shape((2, blocks, kv_heads, size, dim), dtype), unfit(dtype), dtype=dtype)
    for table, total in zip(step.block_table.long(), step.kv_lens_host, strict=True):
        held = torch.arange(total)
        kv[:, table[held // size], :, held % size] = rounded(torch.randn(total, 2, kv_heads, dim), dtype)
    return kv


def fused(
    tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of one projection."""
    both = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    q, k, v = both.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    return q.view(-1, heads, dim), k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim)


def assert_near(out: Tensor, expected: Tensor, largest: float = 1.0) -> None:
    """Compare the digits that attention in this type has to numbers that are about so large."""
    assert out.dtype in (torch.float32, torch.bfloat16)
    tolerance = 1e-5 if out.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(out.float(), expected.float(), atol=tolerance * largest, rtol=tolerance)


def rows_of(step: ForwardContext, first: int, last: int) -> ForwardContext:
    """Some rows of a step, as a step of their own."""
    starts = step.query_starts[first : last + 1]
    tokens = slice(int(starts[0]), int(starts[-1]))
    return ForwardContext(
        positions=step.positions[tokens],
        query_starts=starts - starts[0],
        kv_lens=step.kv_lens[first:last],
        block_table=step.block_table[first:last],
        slot_mapping=step.slot_mapping[tokens],
        block_size=step.block_size,
        query_lens_host=step.query_lens_host[first:last],
        kv_lens_host=step.kv_lens_host[first:last],
    )
