"""Loads the model that a worker serves, and tells the tasks for which it is served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from models.layers.cross_attention import find_source_model
from models.loader import LoadOptions, load_model
from models.model import ServedModel
from models.ops.grouped_matrix import describe_sizes
from models.parallel.parallel import Parallel
from models.pooling.alignment import find_alignment
from models.quantization.config import MADE_ON_LOADING, MOST_BITS, read_quantization
from models.towers.model import transcribes
from worker.capacity import WorkerLimits
from worker.config import WorkerConfig
from worker.devices.base import Device
from worker.devices.dtype_choice import choose_dtypes
from worker.devices.fingerprint import find_fingerprint
from worker.devices.packed_cache import Misfit
from worker.host.memory import ReadPages, release_after_loading
from worker.ranks.pipeline_stage import Stage, open_stage
from worker.ranks.process_groups import Groups, parallel_of
from worker.tasks import POOLED

logger = logging.getLogger(__name__)

_WAYS = "leave it out, or choose another --runner or --convert"


Report = Callable[[str, float], None]
"""The type of a function that takes the phase of a load and the part of it that is done, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model, and where it is served."""

    model: ServedModel
    options: LoadOptions
    config: WorkerConfig
    device: Device
    groups: Groups
    stage: Stage | None
    tasks: tuple[str, ...]
    block_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype


@contextmanager
def loading(
    config: WorkerConfig, device: Device, groups: Groups, limits: WorkerLimits, report: Report
) -> Iterator[Loaded]:
    """Load the served model, while the device makes its kernels ready. Features load within the context."""
    dtype, cache_dtype = choose_dtypes(config, device)
    of_stream = config.model.hidden_size, dtype, device.target
    stage = open_stage(config.place, groups.links, *of_stream, steps_behind(config) + 1)
    parallel = parallel_of(config, groups)
    given = config, (dtype, cache_dtype), limits.block_size, parallel, groups.minimum
    with device.while_loading(*given):
        options = load_options(config, device, dtype, parallel, limits.max_model_len)
        model = load_weights(options, device, report)
        of_model = stage, offered_tasks(config, model), limits.block_size, dtype, cache_dtype
        yield Loaded(model, options, config, device, groups, *of_model)


def settle(loaded: Loaded, weights: Sequence[Tensor], max_len: int) -> str:
    """Adapt the device to loaded weights, and log what of a checkpoint is quantized -> the fingerprint."""
    config, device = loaded.config, loaded.device
    device.after_loading(weights)
    made = config.options.quantization in MADE_ON_LOADING
    if (found := read_quantization(config.model)) and found.bits <= MOST_BITS and not made:
        logger.info("%s: %s", found.describe(), describe_sizes(loaded.model.parameters()))
    fingerprint = find_fingerprint(config, device, loaded.dtype, max_len)
    release_after_loading(Path(config.folder))
    return fingerprint


def steps_behind(config: WorkerConfig) -> int:
    """The steps that may be under way when one starts."""
    return config.steps_ahead + config.place.stages - 1


def load_options(
    config: WorkerConfig, device: Device, dtype: torch.dtype, parallel: Parallel, max_len: int
) -> LoadOptions:
    """What decides the served model; sequences have up to `max_len` tokens."""
    return LoadOptions(
        config.model,
        Path(config.folder),
        device=device.target,
        dtype=dtype,
        load_format=config.options.load_format,
        seed=config.options.seed,
        model_impl=config.options.model_impl,
        trust_remote_code=config.options.trust_remote_code,
        language_model_only=config.options.language_model_only,
        parallel=parallel,
        max_len=max_len,
        conversion=config.conversion,
        pooling=config.pooling,
    )


def load_weights(options: LoadOptions, device: Device, report: Report) -> ServedModel:
    """Load a model, while pages of its files that were read are given back."""
    pages = ReadPages(options.folder)

    def loaded(fraction: float) -> None:
        report("weights", fraction)
        pages.follow(fraction)

    while True:
        with suppress(Misfit), device.uploading() as upload, device.keeping(options) as earlier:
            return load_model(replace(options, report=loaded, earlier=earlier), upload)


def offered_tasks(config: WorkerConfig, model: ServedModel) -> tuple[str, ...]:
    """The tasks that requests may ask for: all that the model can do, or those the operator wants."""
    source, pooler = find_source_model(model.modules()), model.pooler
    kind = "" if source is None else source.source_kind
    made = ("generate", "transcription") if transcribes(model) else ("generate",)
    made = ("transcription",) if kind == "audio" else made
    generates = made if config.conversion.runner == "generate" else ()
    wanted = config.pooling.task
    pooled = () if kind else pooler.tasks
    able = generates + tuple(task for task in POOLED if task in pooled and wanted in (None, task))
    if wanted is not None and wanted not in able:
        raise ValueError(
            f"--pooler-config asks for {wanted}, and this model offers {_list(pooler.tasks)}: {_WAYS}"
        )
    if missing := [task for task in config.tasks if task not in able]:
        raise ValueError(
            f"--tasks asks for {', '.join(missing)}, and this model, served with --runner "
            f"{config.conversion.runner}, offers {', '.join(able)}: {_WAYS}"
        )
    if (
        generates and find_alignment(model.modules()) is not None
    ):  # times of words are told with transcriptions
        return (*generates, "align")
    if config.tasks:
        return tuple(task for task in able if task in config.tasks)
    if not generates or wanted is not None:
        return able
    # Beside generation, tasks for single tokens are offered on demand only: they store all hidden states.
    return tuple(task for task in able if not task.startswith("token_"))


def _list(tasks: frozenset[str]) -> str:
    return ", ".join(task for task in POOLED if task in tasks)
