"""Replayed steps of latent attention, against the same without a recording: bit for bit, and in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from compared import Compared, layout_of
from kernel_levels import NAMES
from paged import make_step
from torch import Tensor

from models import ops
from models.context import context, use_context
from worker.kernels.cpu import operations
from worker.tables.slots import Slots

pytestmark = pytest.mark.skipif(not NAMES, reason="there are no C kernels for this processor")

HEADS, RANK, ROPE, NOPE, VALUE, WIDTH, BLOCK, BLOCKS = 5, 48, 8, 24, 40, 64, 16, 40


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    ops.use(operations.open_kernels(2))
    torch.manual_seed(0)
    yield
    operations.open_kernels(1)
    ops.use({})


class Layer:
    """Latent attention to a cache of its own, with projections of random tokens."""

    def __init__(self, dtype: torch.dtype) -> None:
        def matrix(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns) / columns**0.5).to(dtype)

        self.embeddings = matrix(100, WIDTH) * 8
        self.queries = ops.pack(matrix(HEADS * (NOPE + ROPE), WIDTH))
        self.latents = ops.pack(matrix(RANK + ROPE, WIDTH))
        self.up = ops.pack_latent(matrix(HEADS * (NOPE + VALUE), RANK), HEADS, NOPE, RANK)
        self.frequencies = 0.1 ** torch.arange(ROPE // 2)
        self.cache = torch.randn(BLOCKS, BLOCK, RANK + ROPE).to(dtype)

    def cache_parts(self) -> list[Tensor]:
        return [self.cache]

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        x = ops.embed(ids, self.embeddings)
        q = ops.linear(x, self.queries).view(len(ids), HEADS, NOPE + ROPE)
        cos_sin = ops.angles(positions, self.frequencies, 1.0)
        given = q, ops.linear(x, self.latents), self.up, self.cache, context(), cos_sin
        return ops.latent_attention(*given, scale=0.2).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_steps_have_the_same_bits(dtype: torch.dtype) -> None:
    layer = Layer(dtype)
    slots = Slots(torch.device("cpu"), 8, 20 * BLOCK, BLOCK)
    compared = Compared(layer.forward, layout_of(slots), [layer])  # pyright: ignore[reportArgumentType]
    for new, total in (([1], [1]), ([1], [300]), ([1, 1], [20, 290]), ([30], [300]), ([7, 1], [7, 5])):
        step = make_step(new, total, BLOCK)
        with use_context(step):
            compared(torch.randint(100, (sum(new),)), step.positions)
    assert compared.replays == 5
