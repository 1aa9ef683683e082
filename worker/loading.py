"""Loads what a worker computes with: the served model, and the drafter that guesses for it, if any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from models.families.drafters.head import DraftHead
from models.layers.moe import MoeMLP
from models.loader import LoadOptions, begin_reading, load_model
from models.model import ServedModel
from models.parallel.parallel import Parallel
from models.pooling.config import PoolingConfig
from models.vision.model import transcribes
from worker.cache.state_memory import state_layers
from worker.calls.adapters import Adapters
from worker.config import DrafterConfig, WorkerConfig
from worker.devices.base import Device
from worker.devices.selection import dtype_name
from worker.drafter.draft_model import DraftModel
from worker.drafter.hidden_drafter import HiddenDrafter
from worker.host.memory import ReadPages, release_after_loading
from worker.pooling import POOLED, whole_tasks
from worker.sources import find_alignment, source_kind
from worker.steps.drafting import Drafter

_WAYS = "leave it out, or choose another --runner or --convert"
_ADAPTING = {"linear", "gated_linear", "hold_adapters", "lora"}
"""The operations that a device must have to compute adapters."""


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


def load_weights(options: LoadOptions, device: Device, report: Callable[[str, float], None]) -> ServedModel:
    """Load a model, while pages of its files that were read are given back."""
    pages = ReadPages(options.folder)

    def loaded(fraction: float) -> None:
        report("weights", fraction)
        pages.follow(fraction)

    with device.uploading() as upload:
        return load_model(replace(options, report=loaded), upload)


def hold_adapters(
    config: WorkerConfig, options: LoadOptions, device: Device, model: ServedModel
) -> Adapters | None:
    """Let a model that was loaded with these options have adapters, if the operator wants some."""
    lora = config.options.lora
    if not lora.enable_lora:
        return None
    place = config.place
    if place.expert_replicas > 1:
        raise ValueError(
            "--enable-lora: replicas share this model's experts: serve the adapter's own folder, which "
            "merges it into its base"
        )
    if wrong := sorted(_ADAPTING - device.kernels.keys()) if device.target.type != "cpu" else []:
        raise ValueError(
            f"--enable-lora: {device.name} computes {' and '.join(wrong)} wrong: pass --device cpu, or serve "
            "the adapter's own folder, which merges it into its base"
        )
    if lora.fully_sharded_loras and place.tensor_size > 1:
        raise ValueError(
            "--fully-sharded-loras: each rank holds the first matrix of layers that are cut by outputs: "
            "leave it out"
        )
    if lora.lora_dtype not in ("auto", dtype_name(options.dtype)):
        raise ValueError(
            f"--lora-dtype {lora.lora_dtype}: adapters are held in the model's type, "
            f"{dtype_name(options.dtype)}: leave it out, or give --dtype"
        )
    tasks = offered_tasks(config, model)
    return Adapters(lora, options, model, keeps_states=bool(whole_tasks(tasks, model.pooler)))


def load_drafter(
    config: WorkerConfig,
    options: LoadOptions,
    device: Device,
    model: ServedModel,
    report: Callable[[str, float], None],
) -> Drafter | None:
    """Load the drafter for `model`, which was loaded with these options; the last stage has it."""
    drafter = config.drafter
    if drafter is None:
        return None
    if not model.causal:
        raise ValueError(
            f"--speculative-config: nothing is guessed for {config.model.architecture}, which is an encoder: "
            "leave it out"
        )
    if device.target.type != "cpu" and options.parallel.stages > 1:
        raise ValueError(  # its stage alone would replay other graphs than its neighbours
            f"--speculative-config: {drafter.method} needs one stage on {device.name}: leave it out, or "
            "--pipeline-parallel-size"
        )
    ranks = replace(
        options.parallel, stage=0, stages=1
    )  # it lies in the last stage, and is no part of others
    of_drafter = replace(
        options,
        config=drafter.model,
        folder=Path(drafter.folder),
        language_model_only=True,
        parallel=Parallel() if drafter.whole else ranks,
        conversion=drafter.conversion,
        pooling=PoolingConfig(),
        method=drafter.method,
        target=None if drafter.conversion else model,
    )
    if of_drafter.target is not None:
        begin_reading(of_drafter)
    if not options.parallel.last:
        return None
    loaded: Any = load_weights(of_drafter, device, report)
    release_after_loading(of_drafter.folder)
    return _make_drafter(loaded, drafter)


def _make_drafter(loaded: Any, drafter: DrafterConfig) -> DraftModel:
    """Make the drafter that guesses by a loaded model, or by loaded layers."""
    vocabulary = drafter.model.vocab_size
    if isinstance(loaded, DraftHead):
        return HiddenDrafter(loaded, vocabulary, drawn=drafter.drawn)
    if not loaded.causal or state_layers(loaded.modules()):
        raise ValueError(
            f"--speculative-config: {drafter.model.architecture} cannot be a drafter, because it is an "
            "encoder or keeps states: choose one whose layers all attend to earlier tokens"
        )
    return DraftModel(loaded, vocabulary, drawn=drafter.drawn)


def find_mixtures(model: ServedModel, config: WorkerConfig) -> list[MoeMLP]:
    """The layers whose experts may be shared among workers."""
    found = [each for each in model.modules() if isinstance(each, MoeMLP)]
    if config.place.expert_size > 1 and config.place.stages == 1 and not found:
        raise ValueError(
            f"--enable-expert-parallel: the experts of {config.model.architecture} cannot be divided among "
            "workers here; leave it out"
        )
    return found


def offered_tasks(config: WorkerConfig, model: ServedModel) -> tuple[str, ...]:
    """The tasks that requests may ask for: all that the model can do, or those the operator wants."""
    kind, pooler = source_kind(model), model.pooler
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
    if generates and find_alignment(model) is not None:  # times of words are told with transcriptions
        return (*generates, "align")
    if config.tasks:
        return tuple(task for task in able if task in config.tasks)
    if not generates or wanted is not None:
        return able
    # Beside generation, tasks for single tokens are offered on demand only: they store all hidden states.
    return tuple(task for task in able if not task.startswith("token_"))


def _list(tasks: frozenset[str]) -> str:
    return ", ".join(task for task in POOLED if task in tasks)
