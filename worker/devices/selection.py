"""The choice of a worker's device and number type: the only place that asks "am I on CUDA?"."""

from __future__ import annotations

import logging

import torch

from models import ops
from models.quantization.config import MADE_ON_LOADING
from worker.config import WorkerConfig
from worker.devices.base import Device
from worker.devices.cpu import Cpu
from worker.devices.cuda import Cuda

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_device(config: WorkerConfig) -> Device:
    """The device that `config` asks for, with its kernels bound to the operations of `models.ops`."""
    device = _find_device(config)
    ops.use(device.kernels)
    return device


def _find_device(config: WorkerConfig) -> Device:
    place, asked = config.place, config.options
    made = asked.quantization if asked.quantization in MADE_ON_LOADING else None
    match asked.device:
        case "auto" | "cuda" if torch.cuda.is_available():
            if made is not None:
                raise ValueError(
                    f"--quantization {made} is for the CPU: pass --device cpu, or leave it "
                    "out to serve the weights as they are on CUDA"
                )
            return Cuda(place.local_rank)
        case "auto" | "cpu":
            return Cpu(asked.cpu_threads, place.local_ranks, made)
        case "cuda":
            raise ValueError(
                "--device cuda was asked for, but torch finds no CUDA device: check the driver and that this "
                "is a CUDA build of torch, or pass --device cpu"
            )
        case other:
            raise ValueError(f"unknown device {other!r}: choose auto, cpu or cuda")


def choose_dtype(config: WorkerConfig, device: Device) -> torch.dtype:
    """The number type of the model: auto is the checkpoint's. One that the device lacks is refused."""
    wanted = config.model.dtype if config.options.dtype == "auto" else config.options.dtype
    if wanted not in DTYPES:
        raise ValueError(f"unsupported dtype {wanted!r}: pass --dtype with one of {', '.join(DTYPES)}")
    if config.options.dtype == "auto" and _lacks_kernels(config, wanted, device):
        logger.info(
            "the checkpoint is quantized and says float16, which the kernels of the CPU do not know: it is "
            "served in bfloat16, and most exactly with --dtype float32"
        )
        wanted = "bfloat16"
    dtype = DTYPES[wanted]
    device.check_dtype(dtype)
    return dtype


def _lacks_kernels(config: WorkerConfig, wanted: str, device: Device) -> bool:
    """Whether a quantized checkpoint would have to be widened in every step."""
    return config.model.quantization is not None and wanted == "float16" and isinstance(device, Cpu)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type as options have it, without "torch."."""
    return str(dtype).removeprefix("torch.")
