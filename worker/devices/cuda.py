"""A CUDA device: its memory, its transfers and the sizes it has by default.

Its kernels are imported when such a device is opened: they need Triton, which only torch for CUDA brings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from models import ops
from models.checkpoint.files import Upload
from models.config import ModelConfig
from models.layers.attention import CachedAttention
from models.loader import EarlierLoad, LoadOptions
from models.parallel.parallel import Parallel
from models.quantization.config import MADE_ON_CUDA
from models.weight_coding import E4M3
from worker.cache_tiers.host_copies import HostCopies, make_copies
from worker.capacity import GIB, CacheBudget
from worker.config import WorkerConfig
from worker.devices.base import Defaults, plain_attention_bytes
from worker.devices.pinned import CudaLane, pin, pinned_upload
from worker.host.memory import Pages
from worker.host.nvidia import why_card_is_too_old
from worker.kernels.cpu.quantization import describe_savings
from worker.kernels.cuda.capabilities import LEAST_BFLOAT16, Card
from worker.kernels.operations_used import Uses
from worker.ranks.process_groups import DeviceGroup, Group, Groups, Membership
from worker.sampling import token_bounds
from worker.sampling.grouped_logits import BY_TORCH
from worker.sampling.top_k_top_p import Draw, draw_fully
from worker.steps.compute import Compute, Computing
from worker.steps.output import Fetch

if TYPE_CHECKING:
    from worker.kernels.cuda.launch import KernelLaunch

logger = logging.getLogger(__name__)

_SHARE = 0.92
_OUTSIDE_TORCH = GIB
"""Bytes that a process takes beside torch's own, roughly: the driver's context, kernels and workspaces."""
_LARGE = 70 * GIB
"""The memory from which on a card has large steps by default."""
_GRAPH_TOKENS, _MOST_GRAPH_TOKENS, _MOST_OF_SMALL = 512, 2048, 8192
"""The tokens of the largest step that is a graph by default: on any card and for any model, at most, and at
most for a model so small that a card computes them six times over while a host launches a layer."""
_HIDING_LAUNCHES = 1 << 37
"""The products of two numbers that an H100 makes in half a millisecond, in which a host launches a layer. In
steps of more the host waits for the card, and tokens that fill a graph up would only cost time."""
_HOPPER = 9
"""The first major capability of cards that are about as fast; A100 makes half as many."""


class Cuda:
    kernels: Mapping[str, Callable[..., Any]]
    mapped_bytes = 0
    scan = BY_TORCH
    forbid = staticmethod(token_bounds.forbid)

    def __init__(self, config: WorkerConfig, head_dim: int, *, fp8: bool = False) -> None:
        """`head_dim`: the width of heads. `fp8`: whether plain weights become e4m3 when they are loaded.

        The worker's number on this machine is that of its card.
        """
        place = config.place
        self._fp8, self._most_cache_bytes = fp8, config.most_cache_bytes
        self._adapts = config.options.lora.enable_lora
        index, there = place.local_rank, torch.cuda.device_count()
        if index >= there:
            raise ValueError(
                f"worker {index + 1} on this machine needs a CUDA device of its own, and there are {there}: "
                "lower --tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size-local"
            )
        self.target = torch.device("cuda", index)
        torch.cuda.set_device(self.target)
        self.name = self.arithmetic = f"cuda ({torch.cuda.get_device_name(self.target)})"
        if reason := why_card_is_too_old(
            torch.cuda.get_device_capability(self.target), torch.cuda.get_arch_list()
        ):
            raise ValueError(f"{self.name} cannot be used: {reason}, or pass --device cpu")
        _, total = torch.cuda.mem_get_info(self.target)
        large = total >= _LARGE
        self._most_tokens = most_graph_tokens(config, self.target if large else None)
        self.defaults = Defaults(64, 1024 if large else 256, 8192 if large else 2048)
        self.pooling_defaults = Defaults(64, 1024, 16384)
        from worker.kernels.cuda.launch import count_compilations
        from worker.kernels.cuda.operations import cuda_operations  # imports Triton
        from worker.kernels.cuda.products.rounded import torch_multiplies

        count_compilations()
        self._head_dim, self._card = head_dim, Card.of(self.target)
        if self._card.rounds_inputs and (fp8 or config.model.quantization is not None):
            self._card = replace(self._card, scaled_mm=torch_multiplies(self._card, self.target))
        self.kernels = cuda_operations(self._card, fp8=fp8)
        self.draw: Draw = draw_fully

    @property
    def capability(self) -> int:
        """The compute capability as one number: 90 for 9.0."""
        return self._card.capability

    @property
    def kernel_compilations(self) -> int:
        from worker.kernels.cuda.launch import compilations  # imports Triton, as `__init__` does

        return compilations()

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype == torch.bfloat16 and self.capability < LEAST_BFLOAT16:
            raise ValueError(
                f"{self.name} has compute capability {self.capability / 10} and bfloat16 needs 8.0: "
                "pass --dtype float16 or --dtype float32"
            )

    def sums_ranks_exactly(self, dtype: torch.dtype) -> bool:
        """Return false: NCCL adds in an order of its own."""
        return False

    def while_loading(
        self,
        config: WorkerConfig,
        dtypes: tuple[torch.dtype, torch.dtype],
        block_size: int,
        parallel: Parallel,
        minimum: Callable[[int], int],
    ) -> AbstractContextManager[None]:
        """Prove the kernels that the model calls, and compile all of its variants while it loads."""
        from worker.kernels.cuda.compiling.model_variants import (
            compiling,
            model_calls,
            opening_calls,
        )
        from worker.kernels.cuda.operations import cuda_operations  # imports Triton, as `__init__` does

        dtype, cache_dtype = dtypes
        if minimum(int(self._card.scaled_mm)) < self._card.scaled_mm:
            self._card = replace(self._card, scaled_mm=False)
            self.kernels = cuda_operations(self._card, fp8=self._fp8)
        uses = Uses(*[(8, E4M3)] * self._fp8)
        calls: list[KernelLaunch] = []

        def trace() -> Sequence[KernelLaunch]:
            """Take steps without a device; returns the calls that prove what they need."""
            if config.options.model_impl != "transformers":
                model = msgspec.structs.replace(config.model, warnings=())  # the log has them later
                given = Path(config.folder), dtype, self.capability, block_size, cache_dtype, self.kernels
                served = parallel, config.conversion, uses, config.options.lora
                calls.extend(model_calls(model, *given, *served))
            uses.is_known = uses.is_known and config.drafter is None
            return opening_calls(self.capability, self._head_dim, dtype, uses)

        target = self.target if self.target.type == "cuda" else None
        turn = config.place.local_rank, config.place.local_ranks
        with compiling(trace, target, turn):
            pass  # so that the proofs, which follow, find all compiled
        self._prove(dtype, uses if uses.is_known else None, minimum)
        ops.use(self.kernels)
        return compiling(lambda: calls, target, turn)

    def _prove(self, dtype: torch.dtype, uses: Uses | None, minimum: Callable[[int], int]) -> None:
        """Leave to torch what is wrong on this card or on that of another rank."""
        from worker.kernels.cuda.draw_kernel import draw  # imports Triton, as `__init__` does
        from worker.kernels.cuda.kernel_self_test import DRAW, agree, prove

        own = prove(self._card, self.target, self._head_dim, dtype, uses, self.lost)
        names = agree(own, [*self.kernels, DRAW], minimum)
        if others := sorted(names.difference(own)):
            logger.error("torch does %s, too, which another rank's card computes wrong", ", ".join(others))
        self.kernels = {name: each for name, each in self.kernels.items() if name not in names}
        self.draw = draw_fully if DRAW in names else draw

    def uploading(self) -> AbstractContextManager[Upload]:
        return pinned_upload(self.target)

    def keeping(self, options: LoadOptions) -> AbstractContextManager[EarlierLoad]:
        """Keep nothing: weights are not packed for a card."""
        return nullcontext(EarlierLoad())

    def begin(self) -> None: ...

    def after_loading(self, weights: Iterable[Tensor]) -> None:
        """Say what was saved, if weights were to be quantized, and which inputs are rounded."""
        from worker.kernels.cuda.products.rounded import describe_rounding  # imports Triton

        weights = list(weights)
        if self._fp8:
            logger.info("%s", describe_savings(MADE_ON_CUDA, weights))
        if line := describe_rounding(weights, self._card):
            logger.info("%s", line)

    def quickened(self, compute: Compute, groups: Groups) -> Computing:
        """Replay small steps as graphs, and send plans of attention along with all others."""
        if "source" in compute.slots.rooms:  # for which graphs have none
            return compute
        from worker.kernels.cuda.draw_kernel import draw, draw_into  # imports Triton, as `__init__` does
        from worker.kernels.cuda.fused.joined_products import JOINED
        from worker.kernels.cuda.steps.graph_capture import CudaCapture
        from worker.kernels.cuda.steps.step_graphs import open_graphs

        drawn = draw_into if self.draw is draw else None
        capture = partial(CudaCapture, self.target)
        joins = JOINED.issubset(self.kernels)
        return open_graphs(compute, self._card, capture, drawn, groups, most=self._most_tokens, joins=joins)

    def recording_bytes(
        self, rows: int, *, per_row: int, per_token: int, attention: Callable[[int], int]
    ) -> int:
        from worker.kernels.cuda.steps.step_graphs import graph_bytes  # imports Triton, as `__init__` does

        most = self._most_tokens
        if not most:
            return 0
        rows = min(most, rows) if per_row else 0
        given = {"per_row": per_row, "per_token": per_token, "kinds": 1 + self._adapts}
        return graph_bytes(rows, most, **given) + attention(most)

    def attention_bytes(
        self, layers: Sequence[CachedAttention], tokens: int, longest: int, dtype: torch.dtype
    ) -> int:
        """Without masks and scores, unless torch computes some layer."""
        from worker.kernels.cuda import attention, latent_attention  # imports Triton, as `__init__` does

        def by_kernels(layer: CachedAttention) -> bool:
            plain = "attention" in self.kernels and attention.knows(layer)
            return plain or ("latent_attention" in self.kernels and latent_attention.knows(layer))

        if not all(map(by_kernels, layers)):
            return plain_attention_bytes(layers, tokens, longest, dtype)
        prepared = max(
            (
                layer.step_bytes(tokens, 0, 0, dtype.itemsize)
                + latent_attention.prepared_bytes(layer, tokens, dtype.itemsize)
                for layer in layers
            ),
            default=0,
        )
        return prepared + attention.split_bytes(self._card)

    def cache_budget(self, share: float | None, reserve: int) -> CacheBudget:
        """The wanted share of all memory, less what this process holds and what a step needs.

        Other processes may use the card: what they hold counts only if it leaves less than the share.
        """
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.target)
        wanted = int(total * (_SHARE if share is None else share))
        own = torch.cuda.memory_reserved(self.target) + _OUTSIDE_TORCH
        nbytes = min(wanted - own, free) - reserve
        if share is None and self._most_cache_bytes is not None:
            nbytes = min(nbytes, self._most_cache_bytes)
        return CacheBudget(max(0, nbytes), "--gpu-memory-utilization", most=free)

    def held_bytes(self, reserve: int) -> int:
        reserved = torch.cuda.memory_reserved(self.target)
        return max(reserved, torch.cuda.memory_allocated(self.target) + reserve) + _OUTSIDE_TORCH

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.target)

    def pages(self, parts: Sequence[Tensor], blocks: int) -> Pages:
        """Return no thread: memory of the device has no pages that are made later."""
        return Pages()

    def host_copies(self, parts: Sequence[Tensor], nbytes: int) -> HostCopies | None:
        steps, beside = torch.cuda.current_stream(self.target), torch.cuda.Stream(self.target)
        return make_copies(
            parts, nbytes, CudaLane(steps), CudaLane(beside), lambda memory: pin(memory, self.target)
        )

    def staging_buffer(self, words: int) -> tuple[Tensor, Tensor]:
        """The host's part is pinned memory, or the copy to the device would make the host wait."""
        host = torch.empty(words, dtype=torch.int32, pin_memory=True)
        return host, torch.empty(words, dtype=torch.int32, device=self.target)

    def fetch(self, values: Tensor) -> Fetch:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # the waiting thread sleeps, it does not spin
        done.record()
        return partial(_await, host, done, self.target)

    def open_group(self, member: Membership) -> Group:
        return DeviceGroup(member)

    def lost(self, error: Exception) -> bool:
        """Ask the device: errors of torch, Triton, cuBLAS and NCCL have classes of their own."""
        try:
            torch.cuda.synchronize(self.target)
            return not bool(torch.ones(1, device=self.target).add_(1).eq(2).item())
        except torch.OutOfMemoryError:
            return False
        except Exception:
            return True

    def close(self) -> None:
        torch.cuda.empty_cache()


def _await(host: Tensor, done: torch.cuda.Event, target: torch.device) -> np.ndarray:
    """Wait for a copy, in any thread: one that names no device opens a context on the first one."""
    torch.cuda.set_device(target)
    done.synchronize()
    return host.numpy()


def most_graph_tokens(config: WorkerConfig, large: torch.device | None) -> int:
    """The tokens of the largest step that is a graph; 0: none is. `large`: the card, if it is a large one.

    By default they are as many as such a card computes while a host launches a layer for them.
    """
    asked, model = config.options, config.model
    if asked.enforce_eager or asked.max_cudagraph_capture_size is not None:
        return 0 if asked.enforce_eager else asked.max_cudagraph_capture_size or 0
    most = _GRAPH_TOKENS
    if large is not None:
        products = max(1, layer_numbers(model) // config.place.tensor_size)
        if torch.cuda.get_device_capability(large)[0] < _HOPPER:
            products *= 2
        hidden = _HIDING_LAUNCHES // products // 256 * 256
        most = max(most, min(_MOST_GRAPH_TOKENS, hidden), min(_MOST_OF_SMALL, hidden // 6 // 2048 * 2048))
    return min(most, asked.max_num_batched_tokens or most)


def layer_numbers(model: ModelConfig) -> int:
    """The numbers in the matrices of a layer, roughly: four for attention, and three for what follows it."""
    inner = model.raw.get("intermediate_size")
    inner = inner if isinstance(inner, int) else 4 * model.hidden_size
    return model.hidden_size * (4 * model.hidden_size + 3 * inner)
