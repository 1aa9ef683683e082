"""The fingerprint of a served model: it changes with everything that decides the bits of answers.

It is the same for any number of threads, slots and tokens of a step, and of ranks where their sums are exact,
but not of ranks that hold whole experts, unless each expert's result returns by itself.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec
import torch

from models.fingerprint import digest_weights
from models.parallel.rank_shares import most_ranks_of
from models.quantization.config import read_quantization
from worker.config import WorkerConfig
from worker.devices.base import Device
from worker.devices.dtype_choice import dtype_name

_BY_LENGTH = ("dynamic", "longrope", "su")
"""Types of rope whose frequencies depend on the length of the longest sequence."""


def find_fingerprint(config: WorkerConfig, device: Device, dtype: torch.dtype, max_len: int) -> str:
    """Digest everything that decides the bits of a loaded model -> "fp_" and 16 hexadecimal digits."""
    weights = digest_weights(Path(config.folder), config.options.load_format, config.options.seed)
    options, raw = config.options, config.model.raw
    parts = (
        weights,
        msgspec.json.encode(config.model, order="sorted"),
        config.conversion,
        options.model_impl.replace("vllm", "facet").replace("auto", "facet"),
        options.quantization,
        options.quantized_inputs,
        *options.logits_processors,
        dtype_name(dtype),
        options.kv_cache_dtype,
        device.arithmetic,
        torch.__version__,
        _ranks_that_count(config, device, dtype),
        max_len if _depends_on_length(raw) else None,
    )
    return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _ranks_that_count(config: WorkerConfig, device: Device, dtype: torch.dtype) -> tuple[int | str, ...]:
    """The number of tensor ranks if it decides bits, else 1, and what decides them of whole experts."""
    place, model = config.place, config.model
    ranks = place.tensor_size
    divides = most_ranks_of(model.num_heads, model.num_kv_heads) % ranks == 0
    quantization = read_quantization(model)
    ordered = quantization is not None and quantization.ordered
    drawn = config.options.load_format == "dummy"  # for each rank
    alike = divides and device.sums_ranks_exactly(dtype) and not drawn and not ordered
    of_sums = 1 if alike else ranks
    if place.expert_size == 1:
        return (of_sums,)
    if place.expert_transport == "all_to_all" and not drawn:
        return of_sums, place.expert_transport
    return ranks, place.expert_transport, place.expert_size, place.expert_placement


def _depends_on_length(raw: object) -> bool:
    text = json.dumps(raw)
    return "rotary_scaling_factor" in text or any(f'"{kind}"' in text for kind in _BY_LENGTH)
