"""A forward pass with small steps replayed, each of them compared with the model's own code."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from models.context import ForwardContext, context, use_context
from models.layers.attention import CachedAttention
from worker.kernels.cpu import operations
from worker.kernels.cpu.recording import MOST_TOKENS, Layout, recorded
from worker.tables.slots import Slots

TENSORS = ("positions", "slot_mapping", "query_starts", "kv_lens")


class Compared:
    """Runs every step twice and asserts that the results and the cache have the same bits."""

    def __init__(
        self, forward: Callable[..., Tensor], layout: Layout, layers: Sequence[CachedAttention] = ()
    ) -> None:
        library, _ = operations.choose_kernels()
        assert library is not None
        self._plain = forward
        self._layout = layout
        parts = (part for layer in layers for part in layer.cache_parts())
        self._caches = [part.transpose(1, 2) if part.dim() == 4 else part for part in parts]
        self.sizes: list[tuple[int, int]] = []
        """The numbers of tokens and rows of all steps so far."""
        self._runs = 0
        self._replayed = recorded(self._count, library, layout)
        self._runs = 0  # runs that recorded do not count

    @property
    def replays(self) -> int:
        return len(self.sizes) - self._runs

    def __call__(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        step = context()
        self.sizes.append((len(ids), len(step.kv_lens)))
        expected, written = self._run(self._plain, ids, step)
        hidden, same = self._run(self._replayed, *self._placed(ids, step))
        assert torch.equal(hidden, expected)
        assert not hidden.isnan().any()
        assert all(torch.equal(*pair) for pair in zip(written, same, strict=True))
        return hidden

    def _placed(self, ids: Tensor, step: ForwardContext) -> tuple[Tensor, ForwardContext]:
        """The step, in fixed memory if it is small, as the layout would put it there."""
        if len(ids) > MOST_TOKENS:
            return ids, step
        fixed = self._layout.fixed_inputs(len(ids), len(step.kv_lens))
        if fixed.ids.data_ptr() == ids.data_ptr():
            return ids, step
        fixed.block_table[:, : step.block_table.shape[1]] = step.block_table
        for name in TENSORS:
            getattr(fixed, name).copy_(getattr(step, name))
        fixed.ids.copy_(ids)
        return fixed.ids, replace(step, **{name: getattr(fixed, name) for name in (*TENSORS, "block_table")})

    def _run(
        self, forward: Callable[..., Tensor], ids: Tensor, step: ForwardContext
    ) -> tuple[Tensor, list[Tensor]]:
        """-> hidden states, and what was written to the caches [blocks, block_size, ...]."""
        blocks, offsets = step.slot_mapping // step.block_size, step.slot_mapping % step.block_size
        for kv in self._caches:
            kv[blocks, offsets] = torch.nan
        with use_context(step):
            hidden = forward(ids, step.positions)
        return hidden, [kv[blocks, offsets] for kv in self._caches]

    def _count(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        self._runs += 1
        return self._plain(ids, positions)


def layout_of(slots: Slots) -> Layout:
    library, _ = operations.choose_kernels()
    assert library is not None
    return Layout(library, slots)
