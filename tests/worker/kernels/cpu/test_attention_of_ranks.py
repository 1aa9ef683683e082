"""States of chunks that several ranks have, when joined, are attention to one cache, bit for bit."""

import pytest
import torch
from equal_bits import assert_same_bits
from paged import assert_near, make_cache, make_step
from torch import Tensor
from torch.testing import assert_close

from models.ops import context_ops
from models.ops.context_ops import CHUNK
from worker.kernels.cpu.operations import Table

pytestmark = [pytest.mark.usefixtures("threads")]

LENGTHS = [1, 256, 257, 700, 1300]


def of_rank(kv: Tensor, table: Tensor, rank: int, ranks: int) -> tuple[Tensor, list[int]]:
    """The cache with the chunks of one rank, in blocks of CHUNK one after the other; keys of each row."""
    rows, lengths = [], []
    for blocks, length in zip(table.long(), LENGTHS, strict=True):
        chunks = range(rank, -(-length // CHUNK), ranks)
        rows.append(blocks[list(chunks)])
        lengths.append(sum(min(CHUNK, length - chunk * CHUNK) for chunk in chunks))
    return kv[:, torch.cat(rows)].contiguous(), lengths


@pytest.mark.parametrize(
    ("dtype", "cached"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.int8)],
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_joined_states_are_attention(
    table: Table, dtype: torch.dtype, cached: torch.dtype, ranks: int
) -> None:
    whole = make_step([1] * len(LENGTHS), LENGTHS, CHUNK)
    for group, kv_heads, dim in ((2, 2, 64), (1, 3, 48), (5, 1, 128)):
        heads, count = group * kv_heads, [-(-length // CHUNK) for length in LENGTHS]
        kv, q = make_cache(whole, kv_heads, dim, cached), 2 * torch.randn(len(LENGTHS), heads, dim).to(dtype)
        limits = {"scale": 0.1, "softcap": 3.0 if group == 1 else None}
        sinks = torch.randn(heads) if group == 5 else None
        joined = torch.full((heads, len(LENGTHS), max(count), dim + 2), torch.nan)
        for rank in range(ranks):
            own, lengths = of_rank(kv, whole.block_table, rank, ranks)
            step = make_step([1] * len(LENGTHS), lengths, CHUNK)
            starts = torch.tensor([0, *(-(-length // CHUNK) for length in lengths)]).cumsum(0)
            step.block_table = (starts[:-1, None] + torch.arange(max(count))).int()
            states = table["attention_states"](q, own, step, **limits)
            expected = context_ops.attention_states(q.float(), own, step, **limits)  # pyright: ignore
            for row, length in enumerate(lengths):
                there = slice(-(-length // CHUNK))
                digits = 1e-5 if dtype == torch.float32 else 2**-6
                assert_close(states[row, :, there], expected[row, :, there], atol=digits, rtol=digits)
            joined[:, :, rank::ranks] = states.permute(1, 3, 0, 2, 4).flatten(0, 1)
        counts = torch.tensor(count).int()
        exact = context_ops.join_states(joined.clone(), counts, torch.float32, sinks)
        out = table["join_states"](joined, counts, dtype, sinks)
        assert_near(out, exact)
        assert_same_bits(out, table["attention"](q, kv, whole, sinks=sinks, **limits))
