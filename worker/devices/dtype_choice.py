"""The choice of the number types of a model and of its KV cache."""

from __future__ import annotations

import logging

import torch

from models.config import has_latent_cache
from models.ops.attention_inputs import CACHE_DTYPES, CODES
from models.quantization.config import read_cache_scheme
from worker.config import WorkerConfig
from worker.devices.base import Device
from worker.devices.cpu import Cpu
from worker.devices.cuda import Cuda
from worker.kernels.cuda.capabilities import short_dtype

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_LEAST_CAPABILITY = {torch.float8_e4m3fn: 89, torch.float8_e5m2: 80}
_CODED = ("int8", "int8_per_token_head")


def choose_dtypes(config: WorkerConfig, device: Device) -> tuple[torch.dtype, torch.dtype]:
    """The number types of the model and of its KV cache."""
    dtype = choose_dtype(config, device)
    return dtype, choose_cache_dtype(config, device, dtype)


def choose_dtype(config: WorkerConfig, device: Device) -> torch.dtype:
    """The number type of the model: auto is the checkpoint's, but has no float16 on a CPU, and 16 bits on a
    card. One that the device lacks is refused."""
    wanted = config.model.dtype if config.options.dtype == "auto" else config.options.dtype
    if wanted not in DTYPES:
        raise ValueError(f"unsupported dtype {wanted!r}: pass --dtype with one of {', '.join(DTYPES)}")
    if config.options.dtype == "auto" and wanted == "float16" and isinstance(device, Cpu):
        logger.info(
            "the checkpoint is in float16, which the kernels of the CPU do not know: it is served in "
            "bfloat16, and most exactly with --dtype float32"
        )
        wanted = "bfloat16"
    if config.options.dtype == "auto" and wanted == "float32" and isinstance(device, Cuda):
        pools = config.conversion.runner == "pooling"
        wanted = short_dtype(config.model.architecture, pools=pools, capability=device.capability)
        logger.info(
            "the checkpoint is in float32 and served in %s: pass --dtype float32 for exact results", wanted
        )
    dtype = DTYPES[wanted]
    device.check_dtype(dtype)
    return dtype


def choose_cache_dtype(config: WorkerConfig, device: Device, dtype: torch.dtype) -> torch.dtype:
    """The number type of the KV cache: that of the model, or 8 bits. One that the device lacks is refused.

    With "auto", a checkpoint of compressed-tensors that asks for fp8 gets it where the device has it.
    """
    asked = config.options.kv_cache_dtype
    if asked == "auto":
        return _cache_dtype_of_checkpoint(config, device, dtype)
    if asked == dtype_name(dtype):
        return dtype
    if asked not in CACHE_DTYPES and asked not in _CODED:
        raise ValueError(
            f"unknown --kv-cache-dtype {asked!r}: choose auto, int8, {', '.join(CACHE_DTYPES)}, or the "
            f"model's own type, which is {dtype_name(dtype)}"
        )
    if has_latent_cache(config.model.raw):
        raise ValueError(
            f"--kv-cache-dtype {asked} is for caches of keys and values, and {config.model.architecture} "
            "caches latents, which are small already: leave it out"
        )
    if asked in _CODED:
        if isinstance(device, Cuda):
            raise ValueError(f"--kv-cache-dtype {asked} is for the CPU: fp8 is a cache of 8 bits on CUDA")
        return CODES
    return _float_cache_dtype(config, device, asked)


def _float_cache_dtype(config: WorkerConfig, device: Device, asked: str) -> torch.dtype:
    """The type of 8 bits that was asked for by one of `CACHE_DTYPES`, if CUDA has it."""
    wanted = CACHE_DTYPES[asked]
    if not isinstance(device, Cuda):
        raise ValueError(
            f"--kv-cache-dtype {asked} is for CUDA devices (fp8 from compute capability 8.9 on, fp8_e5m2 "
            "from 8.0): on the CPU pass int8, which is as small and more exact"
        )
    scheme = read_cache_scheme(config.model)
    if scheme is not None and (obstacle := scheme.obstacle):
        raise ValueError(
            f"--kv-cache-dtype {asked}: the checkpoint's 'kv_cache_scheme' has {obstacle}: leave the option "
            "out"
        )
    there, least = device.capability, _LEAST_CAPABILITY[wanted]
    if there < least:
        other = "pass fp8_e5m2, or " if there >= _LEAST_CAPABILITY[torch.float8_e5m2] else ""
        raise ValueError(
            f"--kv-cache-dtype {asked} needs compute capability {least / 10}, and {device.name} has "
            f"{there / 10}: {other}leave it out"
        )
    return wanted


def _cache_dtype_of_checkpoint(config: WorkerConfig, device: Device, dtype: torch.dtype) -> torch.dtype:
    """What the checkpoint asks for, if it can be had; else the model's own type."""
    scheme = read_cache_scheme(config.model)
    if scheme is None:
        return dtype
    small = torch.float8_e4m3fn
    obstacle = scheme.obstacle or _obstacle_to(small, config, device)
    if obstacle is None:
        logger.info(
            "the KV cache is in fp8, as the checkpoint asks: --kv-cache-dtype %s keeps 16 bits",
            dtype_name(dtype),
        )
        return small
    logger.info(
        "the KV cache is in %s: the checkpoint's 'kv_cache_scheme' has %s", dtype_name(dtype), obstacle
    )
    return dtype


def _obstacle_to(small: torch.dtype, config: WorkerConfig, device: Device) -> str | None:
    """Why a cache in fp8 cannot be had here, as the end of a sentence."""
    if not isinstance(device, Cuda):
        return "fp8, which caches on a CPU do not have"
    if device.capability < _LEAST_CAPABILITY[small]:
        return f"fp8, which needs compute capability {_LEAST_CAPABILITY[small] / 10}"
    if has_latent_cache(config.model.raw):
        return "fp8, which is for keys and values, and this model caches latents"
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type as options have it, without "torch."."""
    return str(dtype).removeprefix("torch.")
