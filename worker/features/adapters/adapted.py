"""Adapters as a feature: which tokens of a step have one, and the LM head that some of them change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor

from models.context import ForwardContext
from models.families.decoders.decoder import lm_head
from models.loader import LoadOptions
from models.model import ServedModel
from worker.calls.lora_store import Adapters
from worker.calls.messages import DROP_ADAPTER, ENTER_ADAPTER, READ_ADAPTER
from worker.capacity import WorkerLimits
from worker.config import WorkerConfig
from worker.devices.base import Device
from worker.devices.dtype_choice import dtype_name
from worker.features.adapters.adapter_runs import adapter_runs, chosen_rows
from worker.protocol import NewSeq, StepInput
from worker.steps.feature import Feature
from worker.tables.adapter_rows import AdapterReads
from worker.tables.positions import Columns, Read
from worker.tables.slots import Slots

_ADAPTING = {"linear", "gated_linear", "hold_adapters", "lora"}
"""The operations that a device must have to compute adapters."""


class Adapted(Feature):
    _slots: Slots
    _own: list[tuple[int, int]]
    """The number of each slot's adapter, 0 for none, and the first position that it computes."""

    def __init__(self, adapters: Adapters, model: ServedModel) -> None:
        self._adapters, self._head = adapters, lm_head(model.modules())
        self._adapted: set[int] = set()
        """The slots that have an adapter."""

    def open(self, limits: WorkerLimits, slots: Slots, blocks: int) -> Sequence[Tensor]:
        self._slots, slots.rooms["adapters"] = slots, 1
        self._own = [(0, 0)] * (slots.count + 1)
        return ()

    def methods(self) -> Mapping[str, Callable[..., Any]]:
        adapters = self._adapters
        return {READ_ADAPTER: adapters.read, ENTER_ADAPTER: adapters.enter, DROP_ADAPTER: adapters.drop}

    def admit(self, new: NewSeq) -> None:
        slot = new.slot
        self._own[slot] = new.adapter, new.adapter_from
        (self._adapted.add if new.adapter else self._adapted.discard)(slot)
        params = self._slots.pooling[slot]
        if params is not None:
            own: Any = self._adapters.tasks.get((new.adapter, params.task))
            if own is not None:
                self._slots.pooling[slot] = msgspec.structs.replace(params, task=own)

    def read(self, columns: Columns, step: StepInput) -> Sequence[Read]:
        """Bring adapters to where the step reads them, and tell which tokens have one."""
        if self._adapted.isdisjoint(columns.slots):
            return ()
        self._adapters.bring(self._own[slot][0] for slot in columns.slots)
        runs = adapter_runs(self._own, columns)
        return [AdapterReads(runs, columns.query_starts[-1])] if runs else ()

    def before_logits(self, step: ForwardContext, chosen: Tensor | slice | None) -> None:
        if self._head is not None:
            rows = step.adapters if self._changes_head(step) else None
            self._head.adapted = rows if rows is None or chosen is None else chosen_rows(rows, chosen)

    def _changes_head(self, step: ForwardContext) -> bool:
        """Say whether adapters of a step's tokens may change the LM head."""
        rows = step.adapters
        if rows is None:
            return False
        return not rows.host or any(number in self._adapters.of_head for number, _, _ in rows.host)


def hold_adapters(
    config: WorkerConfig, options: LoadOptions, device: Device, model: ServedModel, *, keeps_states: bool
) -> Adapted:
    """Let a model that was loaded with these options have adapters.

    `keeps_states`: whether hidden states of earlier steps can be pooled. Raises ValueError if this device or
    place computes no adapters.
    """
    lora, place = config.options.lora, config.place
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
    return Adapted(Adapters(lora, options, model, keeps_states=keeps_states), model)
