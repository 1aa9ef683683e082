"""The host's processors as a device: the C kernels, recorded small steps, and memory in huge pages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from models.layers.attention import CachedAttention
from models.loader import EarlierLoad, LoadOptions
from models.parallel.parallel import Parallel
from worker.cache_tiers.host_copies import AtOnce, HostCopies, make_copies
from worker.capacity import GIB, CacheBudget
from worker.config import WorkerConfig
from worker.devices.base import Defaults, plain_attention_bytes
from worker.devices.packed_cache import PackedCache
from worker.host.cpu_threads import count_threads, give_threads
from worker.host.machine import available_memory, total_memory
from worker.host.memory import Pages, PageToucher, huge_pages, keep_freed_memory
from worker.kernels.cpu import operations, vocabulary
from worker.kernels.cpu.packing import Packed
from worker.kernels.cpu.quantization import describe_savings
from worker.kernels.cpu.recording import Layout, recorded
from worker.kernels.cpu.steps.pooled_step import PooledSteps
from worker.ranks.process_groups import Group, Groups, HostGroup, Membership
from worker.sampling import token_bounds
from worker.sampling.grouped_logits import BY_TORCH
from worker.sampling.top_k_top_p import draw_lazily
from worker.steps.compute import Compute, Computing
from worker.steps.output import Fetch

logger = logging.getLogger(__name__)

_CACHE_PERCENT = 40
"""The part of the available memory that caches get at most where the operator does not say how much."""


class Cpu:
    target = torch.device("cpu")
    name = "cpu"
    kernel_compilations = 0  # the C kernels are one library, which is there before any worker
    defaults = Defaults(block_size=32, max_num_seqs=128, max_num_batched_tokens=2048)
    pooling_defaults = Defaults(block_size=32, max_num_seqs=256, max_num_batched_tokens=4096)

    def __init__(
        self,
        threads: int | None,
        ranks: int = 1,
        quantization: str | None = None,
        input_bits: int | None = None,
        most_cache_bytes: int | None = None,
        packed_gib: float = 0.0,
    ) -> None:
        """`ranks`: how many workers share this machine; `most_cache_bytes`: the most for caches where nobody
        says how many; `packed_gib`: GiB of files of packed weights for later starts, 0 for none; the rest is
        that of `open_kernels`."""
        self._ranks, self._most_cache_bytes = ranks, most_cache_bytes or 4 * GIB
        self._quantization = quantization
        self._weight_bytes = 0
        self.threads = count_threads(threads, ranks)
        self.kernels = operations.open_kernels(self.threads, quantization, input_bits)
        library, _ = operations.choose_kernels()
        self._has_library = library is not None
        by_torch = torch.backends.cpu.get_cpu_capability()
        self.arithmetic = f"cpu {by_torch} {library.path.name if library else ''}"
        of_device = self.arithmetic, quantization, input_bits
        self._packed = PackedCache(packed_gib, of_device) if packed_gib else None
        self.draw = draw_lazily
        self.scan = BY_TORCH if library is None else vocabulary.bind(library)
        self.forbid = token_bounds.forbid if library is None else vocabulary.bind_forbid(library)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Every type is allowed: float16 is complete in torch, merely slow."""
        if dtype == torch.float16:
            logger.warning(
                "float16 is computed by torch, as the kernels of the CPU do not know it: --dtype bfloat16 or "
                "float32 is several times as fast"
            )

    def sums_ranks_exactly(self, dtype: torch.dtype) -> bool:
        """Return whether products are added up in sections: in half precision torch alone has none."""
        return dtype == torch.float32 or (dtype == torch.bfloat16 and self._has_library)

    def while_loading(
        self,
        config: WorkerConfig,
        dtypes: tuple[torch.dtype, torch.dtype],
        block_size: int,
        parallel: Parallel,
        minimum: Callable[[int], int],
    ) -> AbstractContextManager[None]:
        """Do nothing: the kernels are there."""
        return nullcontext()

    def uploading(self) -> AbstractContextManager[None]:
        """Give nothing: weights are used where they lie in their files, or are packed from there."""
        return nullcontext()

    def keeping(self, options: LoadOptions) -> AbstractContextManager[EarlierLoad]:
        return nullcontext(EarlierLoad()) if self._packed is None else self._packed.loading(options)

    def begin(self) -> None:
        """Keep packed weights for the next start."""
        if self._packed is not None:
            self._packed.save()

    def after_loading(self, weights: Iterable[Tensor]) -> None:
        """Give torch all threads if no weights are packed (float16, transformers' layers): it computes."""
        keep_freed_memory()
        held = list(weights)
        self._weight_bytes = sum(weight.nbytes for weight in held)
        if not any(isinstance(weight, Packed) for weight in held):
            give_threads(self.threads, None)
        if self._quantization is not None:
            logger.info("%s", describe_savings(self._quantization, held))

    def quickened(self, compute: Compute, groups: Groups) -> Computing:
        """Lay out in C, and replay small steps of the forward pass, if no exchange is a part of it."""
        library, _ = operations.choose_kernels()
        if library is not None:
            compute.lay_out = layout = Layout(library, compute.slots)
            record = partial(recorded, library=library, layout=layout) if groups.alone else None
            if record is not None:
                compute.forward = record(compute.forward)
                hooks, pooler = compute.hooks, compute.model.pooler
                if len(hooks.plan_pools) == 1 and not hooks.keep and not hooks.follow:
                    compute.replay = PooledSteps(compute.model.forward, pooler, library, layout) or None
            for passes in compute.passes:
                may_record = passes.make_stream(0) is None  # recordings read tokens alone
                passes.quicken(layout, record if may_record else None)
        return compute

    def recording_bytes(
        self, rows: int, *, per_row: int, per_token: int, attention: Callable[[int], int]
    ) -> int:
        """Return 0: a recording's results are memory that is committed as steps write it."""
        return 0

    def attention_bytes(
        self, layers: Sequence[CachedAttention], tokens: int, longest: int, dtype: torch.dtype
    ) -> int:
        """The bytes of torch's attention, which float16 needs, and processors without our kernels."""
        return plain_attention_bytes(layers, tokens, longest, dtype)

    def cache_budget(self, share: float | None, reserve: int) -> CacheBudget:
        """A part of the available memory, or the chosen share less the weights, up to what is available.

        Pages are made when they are first used, so the budget is a ceiling.
        """
        available, total = available_memory() - self.mapped_bytes, total_memory()
        most = max(0, total // self._ranks - self._weight_bytes)
        if share is None:
            own = min(self._most_cache_bytes, available * _CACHE_PERCENT // 100) // self._ranks
            return CacheBudget(own, "--kv-cache-memory-bytes", most)
        asked = int(total * share) // self._ranks - self._weight_bytes
        budget = min(asked, available // self._ranks - reserve)
        return CacheBudget(max(0, budget), "--gpu-memory-utilization", most)

    @property
    def mapped_bytes(self) -> int:
        return 0 if self._packed is None else self._packed.mapped_bytes

    def held_bytes(self, reserve: int) -> int:
        """Return 0: the system counts the host's memory."""
        return 0

    def allocate(self, nbytes: int) -> Tensor:
        """Memory in huge pages, where the system has them: all of the cache is read in each step."""
        return huge_pages(nbytes)

    def pages(self, parts: Sequence[Tensor], blocks: int) -> Pages:
        return PageToucher(parts, blocks)

    def host_copies(self, parts: Sequence[Tensor], nbytes: int) -> HostCopies | None:
        return make_copies(parts, nbytes, AtOnce(), AtOnce(), lambda _: lambda: None)

    def staging_buffer(self, words: int) -> tuple[Tensor, Tensor]:
        """One tensor in both roles."""
        buffer = torch.empty(words, dtype=torch.int32)
        return buffer, buffer

    def fetch(self, values: Tensor) -> Fetch:
        return values.numpy

    def open_group(self, member: Membership) -> Group:
        return HostGroup(member)

    def lost(self, error: Exception) -> bool:
        """Return false: a processor that fails says nothing any more."""
        return False

    def close(self) -> None:
        """Do nothing: the host's allocator returns memory by itself."""
