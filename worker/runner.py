"""Runner: a model on a device that takes steps. It only calls the other modules, which handle the tensors.

It opens the device, loads the model, asks each feature for the bytes that it wants, makes the cache, and then
takes step after step. `launch` never waits for the device and may be called again before the last step's
result is read: everything a step needs of earlier ones is on the device already. What a step does beyond
computing tokens and sampling is done by features (`worker/features/`), whose hooks are called by their names.

A model may be spread over ranks. Each has a runner that takes the same steps; the ranks of the last stage
sample and pool, and one of them returns outputs.
"""

from __future__ import annotations

import gc
import logging
from functools import partial
from pathlib import Path

import msgspec
import torch

from models.loader import compare_weights
from worker.cache_tiers.tiered_store import Store
from worker.calls.messages import COMPARE_WEIGHTS
from worker.calls.worker_calls import WorkerCalls
from worker.config import WorkerConfig
from worker.devices.device_choice import open_device
from worker.features.installed import install_features
from worker.host.memory import release_after_loading
from worker.limits import agree, resolve_limits
from worker.memory_table import Memory, divide_memory, loaded_weights, open_memory, size_steps, tell_facts
from worker.model_loading import Loaded, Report, loading, settle
from worker.protocol import StepInput
from worker.ranks.pipeline_stage import SilentStep
from worker.ranks.process_groups import join_groups
from worker.sampling.token_bounds import NextBounds, nothing_follows
from worker.steps.batch import Batch, Launched, Outcome, PooledVectors
from worker.steps.compute import Compute
from worker.steps.output import fetch_output
from worker.steps.planner import StepPlanner
from worker.steps.warmup import warm_up
from worker.tasks import samples
from worker.worker_facts import TimedSteps

logger = logging.getLogger(__name__)


class Runner:
    store: Store | None = None
    """What keeps records of the cache elsewhere, if something does."""
    _failed = False
    """Whether the last step has failed, or is under way."""

    def __init__(self, config: WorkerConfig, report: Report) -> None:
        self._config, self._device = config, open_device(config)
        target, place = self._device.target, config.place
        self._groups = join_groups(place, self._device.open_group, target)
        limits = agree(resolve_limits(config, self._device), self._groups.minimum)
        with loading(config, self._device, self._groups, limits, report) as loaded:
            self._hooks = hooks = install_features(loaded, report)
        self._model, self._stage = loaded.model, loaded.stage
        weights = loaded_weights(loaded, hooks)
        fingerprint = settle(loaded, weights, limits.max_model_len)
        report("cache", 0.0)
        memory = divide_memory(loaded, hooks, size_steps(loaded, hooks, limits), weights)
        self._slots, self._cache, self._staging = open_memory(memory, loaded, hooks)
        self._open_steps(loaded, memory)
        report("cache", 1.0)
        methods = {name: each for own in hooks.methods for name, each in own().items()}
        methods[COMPARE_WEIGHTS] = partial(compare_weights, loaded.options)
        self.call = WorkerCalls(config, self._model, target, methods)
        self.facts = tell_facts(memory, loaded, hooks, fingerprint)
        self._inferring, self._returns_outputs = torch.inference_mode(), place.returns_outputs
        report("warmup", 0.0)
        self._make_ready()
        report("warmup", 1.0)
        logger.debug("ready: %s", self.facts)

    def launch(self, step: StepInput, following: NextBounds = nothing_follows) -> Launched:
        """Start a step. What is told of it later, `following`, is waited for when the model has computed."""
        if self._failed and not step.fresh:
            raise RuntimeError("a step before it failed")
        self._failed = True  # until it has come to its end
        with self._inferring:
            if step.copies:
                self._cache.copy(step.copies)
            for before in self._hooks.before:
                before(step)
            launched = self._run(step, following) if step.seqs else SilentStep(step.number)
        self._failed = False
        return launched

    def _run(self, step: StepInput, following: NextBounds) -> Launched:
        """Plan a step, compute it, and start to fetch its output, or send what the next stage reads."""
        stage = self._stage
        if stage:
            stage.receive_tokens(step, self._slots.tokens)
        noted, replay = self._planner.note(step), self._compute.replay
        if replay is not None and (replayed := replay(noted)) is not None:
            return self._end(step, replayed)
        batch = self._planner.plan(noted, self._staging.open(), following)
        outcome = self._compute(batch)
        if stage and not stage.last:
            stage.send_stream(outcome.hidden, batch.step, batch.sampled, outcome.landed)
            return SilentStep(step.number)
        if stage and outcome.tokens:
            stage.send_tokens(outcome.tokens.tokens)
        return self._end(step, self._finish(batch, outcome))

    def _end(self, step: StepInput, launched: Launched) -> Launched:
        for finish in self._hooks.finish:
            launched = finish(step, launched)
        return launched if self._returns_outputs else SilentStep(step.number)

    def _finish(self, batch: Batch, outcome: Outcome) -> Launched:
        """Pool, and start to fetch the output."""
        pooled = PooledVectors()
        for pool in batch.pools:
            pool(batch, outcome, pooled)
        return fetch_output(self._device, batch, outcome, pooled, batch.tells)

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Do some work, while no step is under way, that makes later ones quicker -> whether more is left."""
        return self._compute.prepare()

    def lost(self, error: Exception) -> bool:
        """Whether a step failed with this error because the device has, so that no other step can run."""
        return self._device.lost(error)

    def close(self) -> None:
        """Give all memory back. The runner is of no use afterwards."""
        self._cache.pages.close()
        for close in self._hooks.close:
            close()
        self._compute.close()
        groups, device, folder = self._groups, self._device, Path(self._config.folder)
        self.__dict__.clear()  # what it has holds all tensors
        gc.collect()  # some parts refer to each other
        groups.close()
        device.close()
        release_after_loading(folder)

    def _open_steps(self, loaded: Loaded, memory: Memory) -> None:
        """Make what plans steps and what computes them, as the device does that quickest."""
        device, vocab_size, slots = self._device, self._config.model.vocab_size, self._slots
        compute = Compute(
            *(self._model, slots),
            vocab_size=vocab_size,
            kills=memory.limits.kills,
            scan=device.scan,
            draw=device.draw,
            stage=self._stage,
            generates=samples(loaded.tasks),
            hooks=self._hooks,
        )
        self._compute = device.quickened(compute, self._groups)
        known = self._cache.size.num_blocks, vocab_size, self._hooks, self._compute.begin
        self._planner = StepPlanner(slots, *known, self._cache.pages)

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
        self._cache.pages.start(len(self.store or ()))  # requests may find these blocks
        self._device.begin()

    def _warm_up(self) -> TimedSteps:
        """Take the first steps -> tokens and seconds of each."""
        given = self.facts, self._slots.dummy, self._hooks.warm_up
        return warm_up(*given, lambda step: self.launch(step).result())
