"""Loads and unloads the models of a server of several: each has an engine of its own, and a frontend here.

The supervisor starts and ends the engines, as `report` tells it, and says what becomes of them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine_core.client.client import EngineClient
from engine_core.config import Address
from engine_core.resolve_checkpoint import find_checkpoint, make_worker_config
from models.checkpoint.hub import SHORT_NAMES
from models.config import ModelConfig, read_config
from models.lora.task_folder import task_adapters
from models.lora_config import TENSORS_FILE
from models.pooling.entity_files import ARCHITECTURE as GLINER
from server.access.keyring import Access
from server.errors import ApiError, Unavailable
from server.frontend.adapter_files import check_modules
from server.frontend.adapters import ServedAdapters, open_adapters
from server.frontend.frontend import Frontend
from server.frontend.model_memory import ModelMemory
from server.frontend.model_set import Slot
from server.helpers.memory import trim_heap
from server.metrics.server_metrics import Metrics
from server.model_facts import GENERATE, SPEECH, Facts
from server.options.model_list import ModelEntry
from server.options.server_flags import ServerConfig
from worker.options import WorkerOptions

_WEIGHTS = ("*.safetensors", "*.gguf", "pytorch_model*.bin", "*.bin", "*.pt")
"""Files with weights; a checkpoint is read from the first kind that it has."""
_LAID_OUT = 1.3
"""What an adapter takes for each byte of its file."""
_SMALLER = {"int8": 0.6, "int8-dynamic": 0.6, "int4": 0.4}
"""What is left of weights of 16 bits that are quantized when they are loaded."""
_MOST_SEQUENCES = 1024
"""The most sequences in a step of any device if nobody says how many."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class ModelState:
    """One model of the server, loaded or not."""

    entry: ModelEntry
    metrics: Metrics
    slot: Slot[Frontend]
    client: EngineClient | None = None
    """The client of its engine, from the beginning of a load."""
    address: Address | None = None
    """Where its engine looks for a client, while it has one."""
    pids: Sequence[int] = ()
    """The processes of its engines."""
    facts: Facts | None = None
    """What was found when it was loaded last."""
    estimate: int | None = None
    """The bytes that it will take as its files say, if these are here and can be served."""
    downloaded: float | None = None
    """The part of it that is here, while it is downloaded."""
    max_len: int | None = None
    """The longest text that its files speak of."""
    tasks: tuple[str, ...] = ()
    """The task that its files say it was made for; others are known once it is loaded."""
    labels: int = 0
    """The labels of a classifier, as its files say."""
    media: tuple[dict[str, int], int] | None = None
    """The most items of each kind, and their bytes, if it takes media."""
    holds_adapters: bool = False
    """Whether adapters for tasks lie in its checkpoint."""
    shown: dict[str, object] | None = None
    """What /api/show told of it when it was loaded, which is as true while it is not."""
    ordered: dict[str, str] = field(default_factory=dict[str, str])
    """The adapters that were ordered while the server runs, and their paths: they are loaded with it."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its engine has got an address, or has none any more."""

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that are loaded with it, each of which means it."""
        return [*self.entry.adapters, *self.ordered]

    @property
    def progress(self) -> str:
        """How far a load has come, for people."""
        if self.client is not None:
            return f"{self.client.progress.phase} {self.client.progress.fraction:.0%}"
        return "waits for its turn" if self.downloaded is None else f"download {self.downloaded:.0%}"


class ModelEngines:
    """The loader of a `ModelSet`."""

    def __init__(self, memory: ModelMemory, access: Access, report: Callable[..., None]) -> None:
        """`report` sends an order to the supervisor, with a model's id and another number."""
        self.states: dict[int, ModelState] = {}
        """The models by the ids of their entries."""
        self._memory, self._access, self._report = memory, access, report

    def state_of(self, slot: Slot[Frontend]) -> ModelState:
        return next(state for state in self.states.values() if state.slot is slot)

    async def measure(self, slot: Slot[Frontend]) -> int:
        state = self.state_of(slot)
        if state.facts is not None:
            return slot.size  # it was measured when it was loaded
        try:
            return await asyncio.to_thread(self._estimate, state)
        except (ValueError, OSError) as error:
            raise _cannot_load(state, str(error)) from error

    async def load(self, slot: Slot[Frontend]) -> Frontend:
        state = self.state_of(slot)
        if state.address is None:
            state.changed.clear()
            self._report("load", state.entry.id, self._memory.most_cache_bytes)
            await state.changed.wait()
        if state.address is None:
            raise _cannot_load(state, "its engine was not started")
        config = state.entry.config
        state.client = EngineClient(
            state.address, config.replicas, restarts=True, restart_wait=config.restart_wait
        )
        frontend = Frontend(config, state.client, state.metrics, self._access)
        try:
            await frontend.start()
            frontend.adapters = open_adapters(frontend)
            if frontend.adapters is not None:
                await self._load_adapters(state, frontend.adapters)
        except (ValueError, OSError, ApiError) as error:
            await self.unload(slot, frontend)
            raise _cannot_load(state, str(error)) from error
        except asyncio.CancelledError:
            state.client.close()
            raise
        self._report("works", state.entry.id)
        state.facts = facts = frontend.facts
        state.tasks, state.max_len = facts.tasks, facts.max_model_len
        taken = frontend.media
        state.media = None if taken is None else (taken.facts.most, taken.most_bytes)
        given = facts.ready.worker, config.engine, config.replicas.size, state.pids
        slot.size = await asyncio.to_thread(self._memory.of_loaded, *given)
        _log.info("%s is loaded, and takes up to %d MiB", slot.name, slot.size >> 20)
        return frontend

    async def _load_adapters(self, state: ModelState, adapters: ServedAdapters) -> None:
        """Load what a model has of adapters. One that was ordered is forgotten if it cannot be loaded."""
        await adapters.start()
        for name, path in list(state.ordered.items()):
            try:
                await adapters.load(name, path, in_place=True)
            except ApiError as error:
                _log.error("%s: the adapter %s is left out: %s", state.slot.name, name, error.message)
                del state.ordered[name]

    async def unload(self, slot: Slot[Frontend], served: Frontend) -> None:
        state = self.state_of(slot)
        if state.address is not None:
            state.changed.clear()
            self._report("unload", state.entry.id)
            await state.changed.wait()
        served.helpers.close()
        self.close_client(state)
        _log.info("%s is unloaded", slot.name)
        served.__dict__.clear()  # its tokenizer goes now, and not when the collector finds it in a circle
        await asyncio.to_thread(trim_heap)

    async def taken_beside(self, loaded: Iterable[Slot[Frontend]]) -> int:
        running = [state for state in self.states.values() if state.address is not None]
        pids = [state.pids for state in running]
        beside, sizes = await asyncio.to_thread(self._memory.measure, pids)
        now = {state.slot: size for state, size in zip(running, sizes, strict=True)}
        for slot in loaded:
            slot.size = max(slot.size, now.get(slot, 0))
        return beside

    def started(self, state: ModelState, address: Address, pids: Sequence[int]) -> None:
        """Note that the engines of a model are these processes."""
        state.address, state.pids = address, pids
        state.changed.set()

    def ended(self, state: ModelState) -> None:
        """Note that the engines of a model have ended for good."""
        state.address, state.pids = None, ()
        state.changed.set()

    def close_client(self, state: ModelState) -> None:
        """Leave the engine of a model, which has ended or will be left to another server."""
        if state.client is not None:
            state.client.close()
            state.client = None

    def peek(self, state: ModelState) -> None:
        """Find out what the files of a model on this machine say of it. Call this in a thread."""
        if _is_local(state.entry.config) and state.facts is None:
            try:
                state.estimate = self._estimate(state)
            except (ValueError, OSError) as error:
                _log.warning("%s cannot be loaded: %s", state.slot.name, " ".join(str(error).split()))

    def _estimate(self, state: ModelState) -> int:
        """The bytes that a model will take. It is downloaded if it is not here."""
        config = state.entry.config

        def report(fraction: float) -> None:
            state.downloaded = fraction if fraction < 1 else None

        from server.media.media_reader import find_taken  # what models of text alone do without

        check_modules(config)
        folder = find_checkpoint(config.engine, report)
        state.downloaded, state.holds_adapters = None, bool(task_adapters(folder))
        model = read_config(folder, config.engine.hf_overrides)
        worker = make_worker_config(config.engine, model, folder)
        runner = worker.conversion
        generates = runner.runner == GENERATE
        state.max_len = config.engine.worker.max_model_len or model.max_len
        classifies = runner.convert == "classify" or "Classification" in runner.architecture
        state.labels = worker.pooling.num_labels if classifies and not generates else 0
        kinds = (
            (generates, GENERATE),
            (runner.architecture == GLINER, "ner"),
            (classifies, "token_classify" if runner.labels_tokens else "classify"),
        )
        does = (next((task for is_it, task in kinds if is_it), "embed"),)
        state.tasks = SPEECH.get(model.architecture, does) if generates else does
        state.media = find_taken(config.media, folder)
        weights = _weight_bytes(folder, model, config) + _adapter_bytes(config)
        replicas = config.replicas.size
        filled = _cached_bytes(model, config.engine.worker) * state.max_len if generates else 0
        return self._memory.estimate(weights, config.engine, replicas=replicas, filled=filled)


def _weight_bytes(folder: Path, model: ModelConfig, config: ServerConfig) -> int:
    found = next((files for kind in _WEIGHTS if (files := [*folder.glob(kind)])), [])
    named = [path for path in found if not path.name.startswith("consolidated")] or found
    size = sum(path.stat().st_size for path in named)
    asked = config.engine.worker
    if asked.dtype == "float32" and model.dtype != "float32" and model.quantization is None:
        size *= 2
    return math.ceil(size * _SMALLER.get(asked.quantization or "", 1.0))


def _cached_bytes(model: ModelConfig, asked: WorkerOptions) -> int:
    """The bytes of a token of each sequence in a step, at most: layers may keep less than keys and values."""
    dtype = model.dtype if asked.dtype == "auto" else asked.dtype
    each = 2 * model.num_layers * model.num_kv_heads * model.head_dim * (4 if dtype == "float32" else 2)
    return each * (asked.max_num_seqs or _MOST_SEQUENCES)


def _adapter_bytes(config: ServerConfig) -> int:
    """The bytes of the adapters that are loaded with a model, as far as they are on this machine."""
    files = [Path(each.path).expanduser() / TENSORS_FILE for each in config.adapters.modules]
    return math.ceil(_LAID_OUT * sum(path.stat().st_size for path in files if path.is_file()))


def _is_local(config: ServerConfig) -> bool:
    return config.engine.model in SHORT_NAMES or Path(config.engine.model).expanduser().exists()


def _cannot_load(state: ModelState, reason: str) -> Unavailable:
    _log.error("%s cannot be loaded: %s", state.slot.name, " ".join(reason.split()))
    return Unavailable(
        f"The model {state.slot.name} cannot be loaded; the server's log says why.",
        retry_after=10,
        reason="load_failed",
    )
