"""The choice of a worker's device: the only place that asks "am I on CUDA?"."""

from __future__ import annotations

import logging
import warnings

import torch

from models import ops
from models.quantization.config import MADE_ON_LOADING, makes_fp8, read_quantization
from models.quantization.methods.gguf import Gguf
from worker.config import WorkerConfig
from worker.devices.base import Device
from worker.devices.cpu import Cpu
from worker.devices.cuda import Cuda
from worker.host import machine, nvidia

logger = logging.getLogger(__name__)

_HEAD_DIM = 64
"""The width of heads with which kernels are proved for models that have none."""


def open_device(config: WorkerConfig) -> Device:
    """The device that `config` asks for, with its kernels bound to the operations of `models.ops`."""
    device = _find_device(config)
    ops.use(device.kernels)
    return device


def _find_device(config: WorkerConfig) -> Device:
    place, asked = config.place, config.options
    made = asked.quantization if asked.quantization in MADE_ON_LOADING else None
    fp8 = makes_fp8(config.model, asked.quantization)
    match asked.device:
        case "auto" | "cuda" if _finds_cuda():
            if made is not None:
                raise ValueError(
                    f"--quantization {made} is for the CPU: pass --device cpu, or leave it "
                    "out to serve the weights as they are on CUDA; fp8 is made there"
                )
            if asked.quantized_inputs != "auto":
                raise ValueError(
                    f"--quantized-inputs {asked.quantized_inputs} is for the CPU: leave it out on CUDA"
                )
            head_dim = config.model.head_dim
            return Cuda(config, head_dim if head_dim > 1 else _HEAD_DIM, fp8=fp8)
        case "auto" | "cpu":
            if asked.kv_offloading_size is not None:
                raise ValueError(
                    "--kv-offloading-size is for cards, and a CPU's cache is in the host's memory anyway: "
                    "raise --kv-cache-memory-bytes, or give --kv-cache-dir to keep prefixes on disk"
                )
            if fp8:
                raise ValueError(
                    "--quantization fp8: the checkpoint is not quantized, and fp8 is made on CUDA alone: "
                    "choose int8, which takes as much memory"
                )
            if asked.device == "auto" and place.local_rank == 0 and (reason := _why_no_cuda()):
                logger.warning("the model is served on the CPU: %s", reason)
            threads, bits = asked.cpu_threads, _input_bits(config)
            kept = asked.packed_cache_gib if asked.packed_cache else 0.0
            return Cpu(threads, place.local_ranks, made, bits, config.most_cache_bytes, kept)
        case "cuda":
            raise ValueError(f"--device cuda was asked for, but {_why_no_cuda() or _why_no_card()}")
        case other:
            raise ValueError(f"unknown device {other!r}: choose auto, cpu or cuda")


def _input_bits(config: WorkerConfig) -> int | None:
    """The bits to which inputs of the checkpoint's quantized matrices are rounded; None: what it says."""
    asked = config.options
    found = read_quantization(config.model)
    if asked.quantized_inputs != "auto":
        if found is None or asked.quantization in MADE_ON_LOADING:
            raise ValueError(
                f"--quantized-inputs {asked.quantized_inputs} is for checkpoints that are quantized and "
                "served as saved: leave it out, or choose --quantization int8-dynamic for inputs of 8 bits"
            )
        return int(asked.quantized_inputs)
    dtype = config.model.dtype if asked.dtype == "auto" else asked.dtype
    return 8 if found is not None and found.method == Gguf.method and dtype != "float32" else None


def _finds_cuda() -> bool:
    """Whether torch finds a card. If not, `_why_no_cuda` says why, in fewer words than torch's warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()


def _why_no_cuda() -> str | None:
    """Why torch finds no card, though something of one is here; None if nothing is, or cards are hidden."""
    if machine.hides_cards():
        return None
    if (reason := nvidia.why_unusable(torch.version.cuda)) or not nvidia.cards_here():
        return reason
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"torch cannot use the NVIDIA card: {str(error).strip().partition(chr(10))[0]}"
    return None


def _why_no_card() -> str:
    """Why `_why_no_cuda` has nothing to say, and what to do about it."""
    if machine.hides_cards():
        return "CUDA_VISIBLE_DEVICES hides all cards: name some in it, or pass --device cpu"
    return "no NVIDIA card is here: leave the option out, or pass --device cpu"
