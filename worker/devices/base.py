"""The interface of a device to the rest of the worker: memory, number types, transfers, sizes by default.

Everything above holds a `Device` and never looks which one it is; `selection.py` opens it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from models.checkpoint.files import Upload
from models.layers.attention import CachedAttention
from models.loader import EarlierLoad, LoadOptions
from models.parallel.parallel import Parallel
from worker.cache_tiers.host_copies import HostCopies
from worker.capacity import CacheBudget
from worker.config import WorkerConfig
from worker.host.memory import Pages
from worker.ranks.process_groups import Group, Groups, Membership
from worker.sampling.grouped_logits import Scan
from worker.sampling.token_bounds import Forbid
from worker.sampling.top_k_top_p import Draw
from worker.steps.compute import Compute, Computing
from worker.steps.output import Fetch


@dataclass(frozen=True, slots=True)
class Defaults:
    """The sizes of blocks and steps if the operator gives none."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


class Device(Protocol):
    target: torch.device
    name: str
    """The name that people read in logs and that `WorkerFacts.device` carries."""
    arithmetic: str
    """Everything about the device and its kernels that decides the bits of results."""
    kernels: Mapping[str, Callable[..., Any]]
    """Operations that this device computes by its own code; the reference in `models.ops` does the others."""
    scan: Scan
    forbid: Forbid
    draw: Draw
    """How tokens are drawn. On a GPU it reads no result in its middle: the host would wait for all queued."""
    defaults: Defaults
    pooling_defaults: Defaults
    """Sizes for models that only pool."""

    @property
    def kernel_compilations(self) -> int:
        """How many kernels this process has compiled for the device so far; 0 where none is."""
        ...

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise ValueError for a number type that the device cannot compute with, and warn of a slow one."""
        ...

    def sums_ranks_exactly(self, dtype: torch.dtype) -> bool:
        """Whether 1, 2, 4 and 8 ranks of these devices give the same bits."""
        ...

    def while_loading(
        self,
        config: WorkerConfig,
        dtypes: tuple[torch.dtype, torch.dtype],
        block_size: int,
        parallel: Parallel,
        minimum: Callable[[int], int],
    ) -> AbstractContextManager[None]:
        """What makes kernels ready in threads while the weights of this model load, and ends when they have.

        `dtypes`: the number types of the model and of its cache. `parallel`: which of the model's pieces are
        computed here. `minimum`: that of all ranks' numbers, as ranks must have the same kernels.
        """
        ...

    def uploading(self) -> AbstractContextManager[Upload | None]:
        """What brings tensors of files to the device's own memory; None where it computes in the host's.

        It may be used within the context, which ends its threads.
        """
        ...

    @property
    def mapped_bytes(self) -> int:
        """The bytes of weights that are pages of files, and that the system counts as available memory."""
        ...

    def keeping(self, options: LoadOptions) -> AbstractContextManager[EarlierLoad]:
        """What uses weights that an earlier load has packed -> what need not be done again.

        Raises Misfit if they do not fit the model: load it again.
        """
        ...

    def begin(self) -> None:
        """Do what can wait until the worker is ready, beside its steps."""
        ...

    def after_loading(self, weights: Iterable[Tensor]) -> None:
        """Adapt to the loaded weights. Called once, after loading."""
        ...

    def quickened(self, compute: Compute, groups: Groups) -> Computing:
        """What computes steps on this device: `compute`, changed, or something in its place.

        It may record steps and replay them, if it can replay their exchanges with the ranks of `groups`, too.
        """
        ...

    def recording_bytes(
        self, rows: int, *, per_row: int, per_token: int, attention: Callable[[int], int]
    ) -> int:
        """The bytes that recorded steps of up to `rows` rows take, beside those of a step that runs.

        `per_row`: those of the logits of a row, 0 if no step samples; `per_token`: those of a layer.
        `attention`: the bytes that the attention of so many tokens takes.
        """
        ...

    def attention_bytes(
        self, layers: Sequence[CachedAttention], tokens: int, longest: int, dtype: torch.dtype
    ) -> int:
        """An upper bound of the bytes that a step takes for one layer's attention, the largest.

        `tokens` of a step, and those of the `longest` sequence.
        """
        ...

    def cache_budget(self, share: float | None, reserve: int) -> CacheBudget:
        """The memory for the KV cache, called after loading; a step needs `reserve` bytes beside it.

        `share`: the part of the device's memory that may be used, if the operator has chosen one.
        """
        ...

    def held_bytes(self, reserve: int) -> int:
        """The bytes of the device's own memory that this process takes at most, once its cache is made.

        A step needs `reserve` bytes beside what is held now. 0 where the device has no memory of its own.
        """
        ...

    def allocate(self, nbytes: int) -> Tensor:
        """Memory for a cache [nbytes] uint8. Nothing is written to it."""
        ...

    def pages(self, parts: Sequence[Tensor], blocks: int) -> Pages:
        """What makes the pages of a cache before they are needed, if memory does not have them yet."""
        ...

    def host_copies(self, parts: Sequence[Tensor], nbytes: int) -> HostCopies | None:
        """Copies of records, of which each of these parts has a piece, to so many bytes of the host's memory
        and back; None if not one has room there."""
        ...

    def staging_buffer(self, words: int) -> tuple[Tensor, Tensor]:
        """An int32 buffer [words] that the host writes, and its copy on the device.

        Both are one tensor where the device computes in the host's memory.
        """
        ...

    def fetch(self, values: Tensor) -> Fetch:
        """Start to copy values to the host."""
        ...

    def open_group(self, member: Membership) -> Group:
        """Join a group of ranks that exchange tensors of this device."""
        ...

    def lost(self, error: Exception) -> bool:
        """Whether the device has failed, after an error: every later use of it in this process fails, too."""
        ...

    def close(self) -> None:
        """Give memory back to the system."""
        ...


def plain_attention_bytes(
    layers: Sequence[CachedAttention], tokens: int, longest: int, dtype: torch.dtype
) -> int:
    """An upper bound of the bytes of attention in plain torch, with `tokens` in a step.

    Devices need it that have no attention of their own. `longest`: the tokens of the longest sequence.
    """
    chunk = min(tokens, longest)
    needed = (layer.step_bytes(tokens, longest, chunk, dtype.itemsize) for layer in layers)
    mask = tokens * longest * (1 + dtype.itemsize)
    return mask + max(needed, default=0)
