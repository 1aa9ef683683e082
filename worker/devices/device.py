"""The device a worker runs on: memory, number types, transfers. The only module that asks "am I on CUDA?".

`Cpu` and `Cuda` answer the same questions; everything above holds one of them and never looks which.
`open_device` also binds its `kernels` (see `worker/kernels/`); what is not among them is computed by the
plain torch reference of `models.ops`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models import ops
from worker.config import WorkerConfig
from worker.host.ahead import Ahead
from worker.host.machine import available_memory, usable_cores
from worker.host.pages import huge_pages, keep_freed
from worker.kernels.cpu import operations, vocabulary
from worker.kernels.cpu.linear import Packed
from worker.kernels.cpu.positions import Layout
from worker.kernels.cpu.quantized import describe_savings
from worker.kernels.cpu.replay import Forward, Replayed
from worker.kernels.cpu.replay_texts import replay_texts
from worker.ranks.groups import DeviceGroup, Group, HostGroup, Membership
from worker.sampling.groups import BY_TORCH
from worker.tables.positions import LayOut, lay_out
from worker.tables.slots import Slots

logger = logging.getLogger(__name__)

_TORCH_THREADS = torch.get_num_threads()
"""torch has read OMP_NUM_THREADS: who sets it means us too."""

GIB = 1 << 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Defaults:
    """The sizes an operator who said nothing gets."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


class Cpu:
    target = torch.device("cpu")
    name = "cpu"
    cache_flag = "--kv-cache-memory-bytes"
    """What an operator changes to get another `cache_budget`."""
    reads_at_once = True
    """Results can be looked at in the middle of a step: nothing runs behind the host's back."""
    defaults = Defaults(block_size=32, max_num_seqs=128, max_num_batched_tokens=2048)
    pooling_defaults = Defaults(block_size=32, max_num_seqs=256, max_num_batched_tokens=4096)

    def __init__(self, threads: int | None, ranks: int = 1, quantization: str | None = None) -> None:
        """`ranks`: how many workers share this machine."""
        self._ranks = ranks
        self._quantization = quantization
        self.threads = threads or min(max(1, usable_cores() // ranks), _TORCH_THREADS)
        self.kernels = operations.open_kernels(self.threads, quantization)
        library, _ = operations.choose()
        self.scan = BY_TORCH if library is None else vocabulary.bind(library)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Every type is allowed: float16 is complete in torch, merely slow where the processor lacks it."""
        if dtype == torch.float16:
            logger.warning("float16 is slow on most processors: bfloat16 or float32 (--dtype) may be faster")

    def settle(self, weights: Iterable[Tensor]) -> None:
        """After loading. If none could be packed (float16, transformers' own layers), torch does the work."""
        keep_freed()
        held = list(weights)
        if not any(isinstance(weight, Packed) for weight in held):
            torch.set_num_threads(self.threads)
        if self._quantization is not None:
            logger.info("%s", describe_savings(self._quantization, held))

    def quickened(self, forward: Forward, slots: Slots, *, replays: bool) -> tuple[LayOut, Forward]:
        """How steps are laid out, and `forward`, with less of Python in small steps.

        `replays`: whether what is computed may be written down and made again.
        """
        library, _ = operations.choose()
        if library is None:
            return lay_out, forward
        layout = Layout(library, slots)
        if not replays:
            return layout, forward
        if slots.paged:
            return layout, Replayed(forward, library, layout)
        return layout, replay_texts(forward, library, layout, slots.max_len)

    def cache_budget(self, utilization: float, reserve: int) -> int:
        """Memory for the KV cache by default. Pages are committed when first used, so this is a ceiling."""
        return min(4 * GIB, available_memory() * 2 // 5) // self._ranks

    def arena(self, nbytes: int) -> Tensor:
        """Untouched memory in huge pages where the system has them: the cache is read all over, each step."""
        return huge_pages(nbytes)

    def ahead(self, parts: Sequence[Tensor], blocks: int) -> Ahead | None:
        """Of a cache whose blocks have their shares in these parts."""
        return Ahead(parts, blocks)

    def mirrored(self, words: int) -> tuple[Tensor, Tensor]:
        """An int32 buffer the host writes and the same one on the device: here they are one."""
        buffer = torch.empty(words, dtype=torch.int32)
        return buffer, buffer

    def fetch(self, values: Tensor) -> Fetch:
        return Fetch(values, None)

    def open_group(self, member: Membership) -> Group:
        return HostGroup(member)

    def close(self) -> None:
        """The allocator of the host returns memory by itself."""


class Cuda:
    kernels: Mapping[str, Callable[..., Any]] = {}
    cache_flag = "--gpu-memory-utilization"
    reads_at_once = False
    scan = BY_TORCH

    def __init__(self, index: int = 0) -> None:
        there = torch.cuda.device_count()
        if index >= there:
            raise ValueError(
                f"worker {index + 1} on this machine needs a CUDA device of its own, and there are {there}: "
                "lower --tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size-local"
            )
        self.target = torch.device("cuda", index)
        torch.cuda.set_device(self.target)
        self.name = f"cuda ({torch.cuda.get_device_name(self.target)})"
        _, total = torch.cuda.mem_get_info(self.target)
        large = total >= 70 * GIB
        self.defaults = Defaults(64, 1024 if large else 256, 8192 if large else 2048)
        self.pooling_defaults = Defaults(64, 1024, 16384)

    def check_dtype(self, dtype: torch.dtype) -> None:
        major, minor = torch.cuda.get_device_capability(self.target)
        if dtype == torch.bfloat16 and major < 8:
            raise ValueError(
                f"{self.name} has compute capability {major}.{minor} and bfloat16 needs 8.0: "
                "pass --dtype float16 or --dtype float32"
            )

    def settle(self, weights: Iterable[Tensor]) -> None:
        """Nothing here depends on them."""

    def quickened(self, forward: Forward, slots: Slots, *, replays: bool) -> tuple[LayOut, Forward]:
        """Nothing is done about it here."""
        return lay_out, forward

    def cache_budget(self, utilization: float, reserve: int) -> int:
        """What the wanted share of all memory leaves, beside what is in use and what a step needs."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.target)
        return max(0, int(total * utilization) - (total - free) - reserve)

    def arena(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.target)

    def ahead(self, parts: Sequence[Tensor], blocks: int) -> Ahead | None:
        """Memory that was taken is there."""
        return None

    def mirrored(self, words: int) -> tuple[Tensor, Tensor]:
        """Pinned on the host, or the copy to the device would wait for it."""
        host = torch.empty(words, dtype=torch.int32, pin_memory=True)
        return host, torch.empty(words, dtype=torch.int32, device=self.target)

    def fetch(self, values: Tensor) -> Fetch:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # the waiting thread sleeps, it does not spin
        done.record()
        return Fetch(host, done)

    def open_group(self, member: Membership) -> Group:
        return DeviceGroup(member)

    def close(self) -> None:
        torch.cuda.empty_cache()


Device = Cpu | Cuda


@dataclass(frozen=True, slots=True)
class Fetch:
    """Values on their way to the host."""

    host: Tensor
    done: torch.cuda.Event | None

    def wait(self) -> np.ndarray:
        if self.done is not None:
            self.done.synchronize()
        return self.host.numpy()


def open_device(config: WorkerConfig) -> Device:
    device = _find_device(config)
    ops.use(device.kernels)
    return device


def _find_device(config: WorkerConfig) -> Device:
    place = config.place
    match config.device:
        case "auto" | "cuda" if torch.cuda.is_available():
            if config.quantization is not None:
                raise ValueError(
                    f"--quantization {config.quantization} is for the CPU: pass --device cpu, or leave it "
                    "out to serve the weights as they are on CUDA"
                )
            return Cuda(place.local_rank)
        case "auto" | "cpu":
            return Cpu(config.cpu_threads, place.local_ranks, config.quantization)
        case "cuda":
            raise ValueError(
                "--device cuda was asked for, but torch finds no CUDA device: check the driver and that this "
                "is a CUDA build of torch, or pass --device cpu"
            )
        case other:
            raise ValueError(f"unknown device {other!r}: choose auto, cpu or cuda")


def choose_dtype(config: WorkerConfig, device: Device) -> torch.dtype:
    """auto is what the checkpoint was saved in; a type that the device cannot compute with is refused."""
    wanted = config.model.dtype if config.dtype == "auto" else config.dtype
    if wanted not in DTYPES:
        raise ValueError(f"unsupported dtype {wanted!r}: pass --dtype with one of {', '.join(DTYPES)}")
    dtype = DTYPES[wanted]
    device.check_dtype(dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
