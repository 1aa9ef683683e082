"""The fingerprint of a served model: it changes with everything that decides the bits of answers.

It is the same for any number of threads, slots and tokens of a step, and of ranks where their sums are exact,
but not of ranks that hold whole experts, unless each expert's result returns by itself.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from models.fingerprint import digest_weights
from models.parallel.rank_shares import most_ranks_of
from models.pooling.routed_folder import QUERIES
from models.pooling.sentence_files import Normalize
from models.quantization.config import MADE_ON_LOADING, read_quantization
from worker.config import WorkerConfig
from worker.devices.base import Device
from worker.devices.selection import dtype_name

_BY_LENGTH = ("dynamic", "longrope", "su")
"""Types of rope whose frequencies depend on the length of the longest sequence."""


_WITHOUT_VECTORS = frozenset(
    {
        "_name_or_path", "architectures", "attn_implementation", "auto_map", "bos_token_id",
        "cache_implementation", "classifier_from_token", "dtype", "eos_token_id", "finetuning_task",
        "gradient_checkpointing", "id2label", "initializer_range", "is_matryoshka", "label2id",
        "matryoshka_dimensions", "matryoshka_dims", "method", "model_max_length", "num_labels",
        "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
        "sentence_transformers", "tie_word_embeddings", "torch_dtype", "torchscript",
        "transformers_version", "use_cache",
    }
)  # fmt: skip
"""Fields of config.json on which no vector depends."""
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


class Digests(NamedTuple):
    """What tells served models apart."""

    fingerprint: str
    """"fp_" and 16 hexadecimal digits."""
    vectors: str
    """What the spaces of vectors have of it."""


def find_digests(config: WorkerConfig, device: Device, dtype: torch.dtype, max_len: int) -> Digests:
    """The digests of a model that is loaded."""
    weights = digest_weights(Path(config.folder), config.options.load_format, config.options.seed)
    return Digests(_fingerprint(config, device, dtype, max_len, weights), _digest_vectors(config, weights))


def _digest_vectors(config: WorkerConfig, weights: str) -> str:
    """A digest of what a checkpoint's vectors depend on, but for their pooling and how texts become tokens.

    These are the weights, those of modules behind the model, what config.json says of layers, how media are
    prepared, and whether weights are quantized when they are loaded. How precisely the device computes does
    not count, nor how many ranks there are.
    """
    folder, options, pooling = Path(config.folder), config.options, config.pooling
    steps = [step for step in (*pooling.token_steps, *pooling.steps) if not isinstance(step, Normalize)]
    beside = [step.folder for step in steps] + [head.file for head in pooling.heads_of_tokens if head.file]
    beside += [QUERIES] if pooling.static_queries else []
    processors = [path.read_bytes() for name in _PROCESSORS if (path := folder / name).is_file()]
    parts = (
        weights,
        [digest_weights(folder / name, options.load_format, options.seed) for name in beside],
        msgspec.json.encode(_of_layers(config.model.whole or config.model.raw), order="sorted"),
        options.quantization if options.quantization in MADE_ON_LOADING else None,
        processors,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _of_layers(fields: object) -> object:
    """The fields of config.json on which vectors depend, in each of its parts."""
    if not isinstance(fields, dict):
        return fields
    return {
        name: _of_layers(value)
        for name, value in fields.items()
        if name not in _WITHOUT_VECTORS and "dropout" not in str(name)
    }


def _fingerprint(config: WorkerConfig, device: Device, dtype: torch.dtype, max_len: int, weights: str) -> str:
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
