"""The adapters of a worker: loaded beside the model under numbers that the engine gives."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.checkpoint.weights import Weights
from models.families.decoders.decoder import lm_head
from models.layers.embedding import Embedding
from models.layers.linear import Linear
from models.layers.stages import Layers
from models.loader import LoadOptions, open_base
from models.lora.adapter_layers import AdaptedLayer, AdapterPull, adaptable_layers, open_adapters
from models.lora.heads import read_head
from models.lora_config import AdapterError, check_modules, check_rank, label_names, read_adapter
from models.model import ServedModel
from models.ops.lora_ops import PreparedAdapter
from models.pooling.task_heads import TaskHead
from models.towers.model import find_tower
from worker.calls.messages import AdapterFacts
from worker.options import LoraOptions

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Read:
    """An adapter that was read: what is prepared of it, and the head that it brings."""

    prepared: PreparedAdapter
    head: tuple[str, TaskHead] | None
    changes_head: bool
    """Whether it changes the LM head."""


class Adapters:
    """Loads and drops adapters. `read` may run beside steps, the other methods run between two of them."""

    def __init__(
        self,
        options: LoraOptions,
        load_options: LoadOptions,
        model: ServedModel,
        *,
        keeps_states: bool = False,
    ) -> None:
        """`keeps_states`: whether hidden states of earlier steps can be pooled."""
        self._options, self._load_options = options, load_options
        self._model, self._keeps_states = model, keeps_states
        self.tasks: dict[tuple[int, str], str] = {}
        """The number of an adapter, and a task -> the task as which the pooler has the adapter's own head."""
        tower: Any = find_tower(model)
        layers = adaptable_layers(model.modules(), tower.modules() if tower else ())
        self._head = None if getattr(model, "labels", None) else lm_head(model.modules())
        heads = [] if self._head is None else [self._head]
        self._layers: list[AdaptedLayer] = [*layers, *(head for head in heads if head.places)]
        self.of_head: set[int] = set()
        """The numbers of adapters that change the LM head."""
        self._elsewhere = [
            *(scope for each in model.modules() if isinstance(each, Layers) for scope in each.elsewhere),
            *(head.path for head in heads if not load_options.parallel.last),
            *(each.path for each in model.modules() if isinstance(each, Embedding) and not each.places),
        ]
        biases: list[tuple[AdaptedLayer, torch.Tensor | None]] = [
            (each, each.bias) for each in self._layers if isinstance(each, Linear)
        ]
        for head in heads:
            biases += ((head, place.of(head.bias)) for place in head.places if head.bias is not None)
        self._biases: dict[AdaptedLayer, torch.Tensor] = {
            layer: bias.float().cpu() for layer, bias in biases if bias is not None and not bias.is_meta
        }
        self._store = open_adapters(self._layers, options.most, options.max_lora_rank, options.most_in_step)
        self._read: dict[int, _Read] = {}
        """What was read for a number, and is not entered yet."""

    @torch.inference_mode()
    def read(self, number: int, folder: str) -> AdapterFacts:
        """Read the adapter of a folder for a number, which may have another one until `enter`.

        Raises AdapterError if it cannot be served: nothing of it is kept.
        """
        started, path = time.monotonic(), Path(folder)
        if not 1 <= number <= self._options.most:
            raise AdapterError(f"adapter {number}: there is room for {self._options.most}")
        config = read_adapter(path)
        check_rank(path.name, config, self._options.max_lora_rank)
        check_modules(path, config, self._options.lora_target_modules)
        head = read_head(path, config, self._load_options.config.output_size, causal=self._model.causal)
        if head and head[1].rows.needs_all and self._model.causal and not self._keeps_states:
            raise AdapterError(
                f"{folder} labels tokens or options, for which the hidden states of a text are kept only if "
                "--tasks names such a task: add --tasks generate embed token_embed"
            )
        pull = AdapterPull(path, config, self._layers, self._open_base, self._biases, self._elsewhere)
        prepared = self._store.prepare(pull.pull())
        self._read[number] = _Read(prepared, head, self._head is not None and pull.changes(self._head))
        _log.debug("%s: read in %.0f ms", folder, 1e3 * (time.monotonic() - started))
        if head is None:
            return AdapterFacts(bytes=prepared.nbytes)
        task, width = head[0], head[1].width
        if task == "decide":
            return AdapterFacts(prepared.nbytes, (task,))
        return AdapterFacts(prepared.nbytes, (task,), {task: width}, label_names(path, width))

    def enter(self, number: int) -> None:
        """Let steps compute with what was read for a number, in place of what they had there."""
        read = self._read.pop(number)
        self.drop(number)
        self._store.enter(number, read.prepared)
        if read.changes_head:
            self.of_head.add(number)
        if read.head is not None:
            task, head = read.head
            if isinstance(head.project, nn.Module):
                head.project.to(self._load_options.device)
            self.tasks[number, task] = own = f"{task} of adapter {number}"
            self._model.pooler.heads[own] = head

    def drop(self, number: int) -> None:
        """Give up what was read for a number or entered there, if there is something."""
        self._read.pop(number, None)
        self.of_head.discard(number)
        for key in [key for key in self.tasks if key[0] == number]:
            del self._model.pooler.heads[self.tasks.pop(key)]
        self._store.drop(number)

    def bring(self, numbers: Iterable[int]) -> None:
        """Have the adapters with these numbers where the next step reads them; 0 is none."""
        self._store.bring(numbers)

    def _open_base(self) -> Weights:
        return open_base(self._load_options)
