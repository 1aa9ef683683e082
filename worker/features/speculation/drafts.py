"""Loads the drafter of a served model, which guesses what that will sample next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.families.drafters.head import DraftHead
from models.layers.state import state_layers
from models.loader import LoadOptions, begin_reading
from models.model import ServedModel
from models.parallel.parallel import Parallel
from models.pooling.config import PoolingConfig
from worker.config import DrafterConfig, WorkerConfig
from worker.devices.base import Device
from worker.features.speculation.draft_model import DraftModel
from worker.features.speculation.hidden_state_drafter import HiddenDrafter
from worker.host.memory import release_after_loading
from worker.model_loading import load_weights


def load_drafter(
    config: WorkerConfig,
    options: LoadOptions,
    device: Device,
    model: ServedModel,
    report: Callable[[str, float], None],
) -> DraftModel | None:
    """Load the drafter for `model`, which was loaded with these options; the last stage has it."""
    drafter = config.drafter
    if drafter is None:
        return None
    if not model.causal:
        raise ValueError(
            f"--speculative-config: {config.model.architecture} is an encoder, which generates no text: "
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
    return _make_drafter(loaded, drafter, device)


def _make_drafter(loaded: Any, drafter: DrafterConfig, device: Device) -> DraftModel:
    """Make the drafter that guesses by a loaded model, or by loaded layers."""
    vocabulary = drafter.model.vocab_size
    if isinstance(loaded, DraftHead):
        return HiddenDrafter(loaded, vocabulary, device, drawn=drafter.drawn)
    if not loaded.causal or state_layers(loaded.modules()):
        raise ValueError(
            f"--speculative-config: {drafter.model.architecture} cannot be a drafter, because it is an "
            "encoder or keeps states: choose one whose layers all attend to earlier tokens"
        )
    return DraftModel(loaded, vocabulary, device, drawn=drafter.drawn)
