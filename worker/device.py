"""The device a worker runs on: memory, number types, transfers. The only module that asks "am I on CUDA?".

`Cpu` and `Cuda` answer the same questions; everything above holds one of them and never looks which.
`open_device` also binds its `kernels` (see `worker/kernels/`); what is not among them is computed by the
plain torch reference of `models.ops`.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models import ops
from worker.config import WorkerConfig
from worker.host import available_memory, usable_cores
from worker.kernels import cpu

logger = logging.getLogger(__name__)

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
    kernels = cpu.TABLE
    cache_flag = "--kv-cache-memory-bytes"
    """What an operator changes to get another `cache_budget`."""
    reads_at_once = True
    """Results can be looked at in the middle of a step: nothing runs behind the host's back."""
    defaults = Defaults(block_size=32, max_num_seqs=128, max_num_batched_tokens=2048)
    pooling_defaults = Defaults(block_size=32, max_num_seqs=256, max_num_batched_tokens=4096)

    def __init__(self, threads: int | None) -> None:
        # torch has read OMP_NUM_THREADS: who sets it means us too.
        self.threads = threads or min(usable_cores(), torch.get_num_threads())
        torch.set_num_threads(self.threads)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Every type is allowed: float16 is complete in torch, merely slow where the processor lacks it."""
        if dtype == torch.float16:
            logger.warning("float16 is slow on most processors: bfloat16 or float32 (--dtype) may be faster")

    def cache_budget(self, utilization: float, reserve: int) -> int:
        """Memory for the KV cache by default. Pages are committed when first used, so this is a ceiling."""
        return min(4 * GIB, available_memory() * 2 // 5)

    def arena(self, nbytes: int) -> Tensor:
        """Untouched memory in huge pages where the system has them: the cache is read all over, each step."""
        pages = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel built without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.uint8)

    def mirrored(self, words: int) -> tuple[Tensor, Tensor]:
        """An int32 buffer the host writes and the same one on the device: here they are one."""
        buffer = torch.empty(words, dtype=torch.int32)
        return buffer, buffer

    def fetch(self, values: Tensor) -> Fetch:
        return Fetch(values, None)

    def close(self) -> None:
        """The allocator of the host returns memory by itself."""


class Cuda:
    kernels: Mapping[str, Callable[..., Any]] = {}
    cache_flag = "--gpu-memory-utilization"
    reads_at_once = False

    def __init__(self) -> None:
        self.target = torch.device("cuda", torch.cuda.current_device())
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

    def cache_budget(self, utilization: float, reserve: int) -> int:
        """What the wanted share of all memory leaves, beside what is in use and what a step needs."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.target)
        return max(0, int(total * utilization) - (total - free) - reserve)

    def arena(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.target)

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
    match config.device:
        case "cpu":
            return Cpu(config.cpu_threads)
        case "auto":
            return Cuda() if torch.cuda.is_available() else Cpu(config.cpu_threads)
        case "cuda" if torch.cuda.is_available():
            return Cuda()
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
