"""Runner: a model on a device that takes steps. It only calls the other modules, which handle the tensors.

`launch` never waits for the device and may be called again before the last step's result is read:
everything a step needs of earlier ones is on the device already. What a step does beyond computing tokens and
sampling is done by features (`worker/features/`), whose hooks are called where they are named here.

A model may be spread over ranks. Each has a runner that takes the same steps; the ranks of the last stage
sample and pool, and one of them returns outputs.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from worker.calls.worker_calls import WorkerCalls
from worker.capacity import WorkerLimits
from worker.config import WorkerConfig
from worker.devices.fingerprint import find_digests
from worker.devices.selection import choose_dtypes, dtype_name, open_device
from worker.disk.opening import Store
from worker.features.installed import install_features
from worker.host.memory import release_after_loading
from worker.limits import agree, fit_whole_sequences, resolve_limits, take_less
from worker.loading import Loaded, describe_quantization, load_options, load_weights, offered_tasks
from worker.memory_table import Memory, divide_memory
from worker.protocol import StepInput
from worker.ranks.pipeline_stage import SilentStep, open_stage
from worker.ranks.process_groups import join_groups, parallel_of
from worker.sampling.token_bounds import NextBounds, nothing_follows
from worker.steps.batch import Batch, Launched, Outcome, PooledVectors
from worker.steps.compute import Compute
from worker.steps.feature import Hooks
from worker.steps.output import fetch_output
from worker.steps.planner import StepPlanner
from worker.steps.warmup import warm_up, warm_up_steps
from worker.tables.slots import Slots
from worker.tables.staging import Staging
from worker.tasks import samples
from worker.worker_facts import WorkerFacts

logger = logging.getLogger(__name__)

Report = Callable[[str, float], None]
"""The type of a function that takes the phase of a load and the part of it that is done, from 0 to 1."""


class Runner:
    store: Store | None = None
    """What keeps records of the cache elsewhere, if something does."""
    _failed = False
    """Whether the last step has failed, or is under way."""

    def __init__(self, config: WorkerConfig, report: Report) -> None:
        self._config, self._device = config, open_device(config)
        target, moves = self._device.target, config.balancing is not None
        self._groups = join_groups(config.place, self._device.open_group, target, moves_experts=moves)
        limits = agree(resolve_limits(config, self._device), self._groups.minimum)
        loaded, hooks = self._load(limits, report)
        self._hooks, self._model, self._stage = hooks, loaded.model, loaded.stage
        weights = [*self._model.parameters(), *(each for own in hooks.weights for each in own())]
        self._device.after_loading(weights)
        describe_quantization(config, self._model)
        fingerprint = find_digests(config, self._device, loaded.dtype, limits.max_model_len).fingerprint
        release_after_loading(Path(config.folder))
        report("cache", 0.0)
        if whole := not self._model.causal or any(reads_whole() for reads_whole in hooks.reads_whole):
            limits = fit_whole_sequences(limits, config)
        limits = take_less(limits, config, self._groups.minimum, whole=whole)
        memory = divide_memory(loaded, hooks, limits, weights)
        self._open_tables(memory)
        compute = Compute(
            self._model,
            self._slots,
            vocab_size=config.model.vocab_size,
            kills=limits.kills,
            scan=self._device.scan,
            draw=self._device.draw,
            stage=self._stage,
            generates=samples(loaded.tasks),
            hooks=hooks,
        )
        self._compute = self._device.quickened(compute, self._groups)
        known = memory.cache.size.num_blocks, config.model.vocab_size, hooks
        self._planner = StepPlanner(self._slots, *known, self._compute.lay_out, self._compute.forms)
        report("cache", 1.0)
        methods = {name: each for own in hooks.methods for name, each in own().items()}
        self.call = WorkerCalls(config, self._model, target, methods)
        self.facts = self._make_facts(loaded, memory, fingerprint)
        report("warmup", 0.0)
        self._make_ready()
        report("warmup", 1.0)
        logger.debug("ready: %s", self.facts)

    @torch.inference_mode()
    def launch(self, step: StepInput, following: NextBounds = nothing_follows) -> Launched:
        """Start a step. What is told of it later, `following`, is waited for when the model has computed."""
        if self._failed and not step.fresh:
            raise RuntimeError("a step before it failed")
        self._failed = True  # until it has come to its end
        for before in self._hooks.before:
            before(step, following)
        self._cache.follow(step)
        launched = self._run(step) if step.seqs else SilentStep(step.number)
        self._failed = False
        return launched

    def _run(self, step: StepInput) -> Launched:
        """Plan a step, compute it, and start to fetch its output, or send what the next stage reads."""
        stage = self._stage
        if stage:
            stage.receive_tokens(step, self._slots.tokens)
        batch = self._planner.plan(step, self._staging.open())
        outcome = self._compute(batch)
        if stage and not stage.last:
            stage.send_stream(outcome.hidden, batch.step, batch.sampled, outcome.landed)
            return SilentStep(step.number)
        if stage and outcome.tokens:
            stage.send_tokens(outcome.tokens.tokens)
        launched = self._finish(batch, outcome)
        for finish in self._hooks.finish:
            launched = finish(step, launched)
        return launched if self._config.place.returns_outputs else SilentStep(step.number)

    def _finish(self, batch: Batch, outcome: Outcome) -> Launched:
        """Pool, and start to fetch the output."""
        pooled = PooledVectors()
        for pool in self._hooks.pool:
            pool(batch, outcome, pooled)
        tells = [found for tell in self._hooks.tell if (found := tell(batch)) is not None]
        return fetch_output(self._device, batch, outcome, pooled, tells)

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Do some work, while no step is under way, that makes later ones quicker -> whether more is left."""
        return self._compute.prepare()

    def lost(self, error: Exception) -> bool:
        """Whether a step failed with this error because the device has, so that no other step can run."""
        return self._device.lost(error)

    def close(self) -> None:
        """Give all memory back. The runner is of no use afterwards."""
        self._cache.close()
        for close in self._hooks.close:
            close()
        self._compute.close()
        groups, device, folder = self._groups, self._device, Path(self._config.folder)
        self.__dict__.clear()  # what it has holds all tensors
        gc.collect()  # some parts refer to each other
        groups.close()
        device.close()
        release_after_loading(folder)

    def _load(self, limits: WorkerLimits, report: Report) -> tuple[Loaded, Hooks]:
        """Load the model, and what features compute with."""
        config, device, groups = self._config, self._device, self._groups
        dtype, cache_dtype = choose_dtypes(config, device)
        of_stream = config.model.hidden_size, dtype, device.target
        stage = open_stage(config.place, groups.links, *of_stream, _steps_behind(config) + 1)
        parallel = parallel_of(config, groups)
        given = config, (dtype, cache_dtype), limits.block_size, parallel, groups.minimum
        with device.while_loading(*given):
            options = load_options(config, device, dtype, parallel, limits.max_model_len)
            model = load_weights(options, device, report)
            of_model = stage, offered_tasks(config, model), limits.block_size, dtype, cache_dtype
            loaded = Loaded(model, options, config, device, groups, *of_model)
            return loaded, install_features(loaded, report)

    def _open_tables(self, memory: Memory) -> None:
        """Make the tables of slots, and have features take their memory."""
        limits, cache = memory.limits, memory.cache
        sizes = limits.max_num_seqs, limits.max_model_len, limits.block_size
        shares = memory.layout.shares
        self._slots = Slots(self._device.target, *sizes, paged=self._model.causal, shares=shares)
        given = limits, self._slots, cache.size.num_blocks
        kept = [part for open_memory in self._hooks.open for part in open_memory(*given)]
        self._cache = replace(cache, parts=[*cache.parts, *kept])
        behind = _steps_behind(self._config)
        self._staging = Staging(self._device.staging_buffer, behind, limits.staged_words)

    def _make_facts(self, loaded: Loaded, memory: Memory, fingerprint: str) -> WorkerFacts:
        limits, size = memory.limits, memory.cache.size
        facts = WorkerFacts(
            device=self._device.name,
            dtype=dtype_name(loaded.dtype),
            block_size=limits.block_size,
            num_blocks=size.num_blocks,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            weight_bytes=memory.weight_bytes,
            kv_bytes=size.num_blocks * size.block_bytes,
            device_bytes=self._device.held_bytes(memory.step_bytes),
            tasks=loaded.tasks,
            windows=memory.layout.windows,
            causal=self._model.causal,
            fingerprint=fingerprint,
        )
        for add_facts in self._hooks.add_facts:
            facts = add_facts(facts)
        return facts

    def _make_ready(self) -> None:
        """Run the first steps and do urgent work, and complete the facts with what is known then."""
        for open_store in self._hooks.open_store:
            self.store = open_store(self.facts, self._cache)
        timed_steps = (self._device.target.type == "cpu" and self._config.timed_steps) or self._warm_up()
        is_left = [self.prepare() for _ in range(self._compute.urgent)]
        self.facts = msgspec.structs.replace(
            self.facts,
            timed_steps=timed_steps,
            has_idle_work=bool(is_left and is_left[-1]),
            kernel_compilations=self._device.kernel_compilations,
        )
        for begin in self._hooks.begin:
            begin()
        self._cache.begin(len(self.store or ()))

    def _warm_up(self) -> tuple[tuple[int, float], ...]:
        """Take the first steps -> tokens and seconds of each."""
        for prepare in self._hooks.warm_up:
            prepare()
        steps = warm_up_steps(self.facts, self._slots.dummy, self._config.place.expert_replicas)
        return warm_up(steps, lambda step: self.launch(step).result(), self.facts.dtype)


def _steps_behind(config: WorkerConfig) -> int:
    """The steps that may be under way when one starts."""
    return config.steps_ahead + config.place.stages - 1
