"""Runner: a model on a device that takes steps. It only calls the other modules, which handle the tensors.

`launch` never waits for the device and may be called again before the last step's result is read:
everything a step needs of earlier ones is on the device already.

A model may be spread over ranks. Each has a runner that takes the same steps; the ranks of the last stage
sample and pool, and one of them returns outputs.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from models.context import context_without_rows, use_context
from models.layers.attention import CachedAttention
from models.model import ServedModel
from models.ops.grouped_matrix import describe_sizes
from models.quantization.config import MADE_ON_LOADING, MOST_BITS, read_quantization
from models.vision.model import find_tower
from worker.cache.cache_groups import CacheLayout, lay_out_cache
from worker.cache.kv_cache import Cache, bytes_beside_cache, no_cache
from worker.cache.making import input_bytes, kept_bytes, make_cache
from worker.cache.state_memory import StateMemory, make_states, most_guesses, state_layers
from worker.calls.worker_calls import WorkerCalls
from worker.config import WorkerConfig
from worker.devices.base import CacheBudget
from worker.devices.fingerprint import find_digests
from worker.devices.selection import choose_dtypes, dtype_name, open_device
from worker.disk.opening import open_store
from worker.experts.balancer import Balancer
from worker.host.memory import release_after_loading
from worker.limits import WorkerLimits, agree, fit_whole_sequences, keep_media, resolve_limits, take_less
from worker.loading import (
    find_mixtures,
    hold_adapters,
    load_drafter,
    load_options,
    load_weights,
    offered_tasks,
)
from worker.media import count_layers, open_media, sees_media, sees_prompts
from worker.pooling import (
    PooledVectors,
    QueryStore,
    apply_late_interaction,
    gather_hidden,
    samples,
    vector_facts,
    whole_tasks,
    widths,
)
from worker.protocol import StepInput
from worker.ranks.pipeline_stage import SilentStep, open_stage
from worker.ranks.process_groups import expert_place, join_groups, parallel_of
from worker.sampling.processors import open_processors
from worker.sampling.token_bounds import BoundsReader, NextBounds, nothing_follows
from worker.sources import encoder_layers, find_source_model, open_sources, open_table, source_kind
from worker.steps.alignment import open_aligner
from worker.steps.batch import Batch, StepPlanner
from worker.steps.compute import Compute, Outcome
from worker.steps.drafting import Drafter, Proposed, add_drafts
from worker.steps.output import StepHandle, fetch_output
from worker.steps.warmup import warm_up, warm_up_steps
from worker.tables.slots import Slots
from worker.tables.staging import Packet, Staging
from worker.worker_facts import CosineScores, WorkerFacts

logger = logging.getLogger(__name__)

StepOutcome = StepHandle | Proposed | SilentStep
"""The type of a step under way, on a rank that returns outputs or on another."""

Report = Callable[[str, float], None]
"""The type of a function that takes the phase of a load and the part of it that is done, from 0 to 1."""


class Runner:
    _balancer: Balancer | None = None
    """What moves experts by load, once the first steps are done."""
    _failed = False
    """Whether the last step has failed, or is under way."""

    def __init__(self, config: WorkerConfig, report: Report) -> None:
        place, self._config, self._device = config.place, config, open_device(config)
        self._dtype, self._cache_dtype = choose_dtypes(config, self._device)
        limits = resolve_limits(config, self._device)
        target, moves = self._device.target, config.balancing is not None
        self._groups = join_groups(place, self._device.open_group, target, moves_experts=moves)
        limits = agree(limits, self._groups.minimum)
        steps_behind = config.steps_ahead + place.stages - 1  # steps that may be under way when one starts
        of_stream = config.model.hidden_size, self._dtype, target
        self._stage = open_stage(place, self._groups.links, *of_stream, steps_behind + 1)
        with self._while_loading(limits.block_size):
            self._model, self._drafter = self._load(limits, report)
        self._device.after_loading(self._parameters)
        made = config.options.quantization in MADE_ON_LOADING
        if (found := read_quantization(config.model)) and found.bits <= MOST_BITS and not made:
            logger.info("%s: %s", found.describe(), describe_sizes(self._model.parameters()))
        self._digests = find_digests(config, self._device, self._dtype, limits.max_model_len)
        release_after_loading(Path(config.folder))
        report("cache", 0.0)
        if reads_whole := not self._model.causal or sees_prompts(find_tower(self._model)):
            limits = fit_whole_sequences(limits, config)
        limits = take_less(limits, config, self._groups.minimum, whole=reads_whole)
        tasks = offered_tasks(config, self._model)
        self._layout = self._lay_out_cache(limits, tasks)
        limits = self._keep_media(limits, tasks)
        self._states, self._remembered, limits = self._make_states(limits, tasks)
        self._cache = self._make_cache(limits, tasks)
        limits = replace(limits, max_model_len=self._cache.size.max_model_len)
        self._slots = self._make_slots(limits)
        self._staging = Staging(self._device.staging_buffer, steps_behind, limits.staged_words)
        self._queries, self._bounds = QueryStore(), BoundsReader()
        self._compute = self._device.quickened(self._make_compute(tasks, limits), self._groups)
        given = self._model, config, self._slots, target, self._dtype
        self._media = open_media(*given, limits.most_embeddings + limits.kept_embeddings)
        self._sources = open_sources(self._model, limits.block_size, target, self._dtype)
        self._aligner = open_aligner(self._model, self._slots)
        self._planner, self._mixtures = self._make_planner(), find_mixtures(self._model, config)
        report("cache", 1.0)
        self.call = WorkerCalls(config, self._model, target, self._adapters)
        self.facts = self._facts(limits, tasks)
        report("warmup", 0.0)
        self.facts = self._make_ready()
        self._balancer = self._make_balancer()
        self._cache.begin(len(self.store or ()))
        report("warmup", 1.0)
        logger.debug("ready: %s", self.facts)

    @torch.inference_mode()
    def launch(self, step: StepInput, following: NextBounds = nothing_follows) -> StepOutcome:
        """Start a step. If it samples bound rows, wait for its bounds when the model has computed."""
        if self._failed and not step.fresh:
            raise RuntimeError("a step before it failed")
        self._failed = True  # until it has come to its end
        if self._balancer:
            self._balancer.before_step()
        if self._media is not None:
            self._media.update(step)
        self._cache.follow(step)
        if self._sources is not None and (step.sources or step.source_layers or step.fresh):
            self._sources.update(step)
        if not step.seqs:
            return self._take_part(step)
        stage = self._stage
        if stage:
            stage.receive_tokens(step, self._slots.tokens)
        batch = self._planner.plan(step, self._staging.open())
        bound = batch.sampled.bound if batch.sampled else {}
        write_bounds = self._bounds.writer(step.number, bound, following, self._device.forbid)
        outcome = self._compute(batch, write_bounds)
        if stage and not stage.last:
            stage.send_stream(outcome.hidden, batch.step, batch.sampled, outcome.landed)
            self._failed = False
            return SilentStep(step.number)
        handle = self._finish(batch, outcome)
        if self._drafter is not None:
            handle = add_drafts(self._drafter, step, handle)
        self._failed = False
        return handle if self._config.place.returns_outputs else SilentStep(step.number)

    def _take_part(self, step: StepInput) -> SilentStep:
        """Compute what this rank's experts make of the tokens of other replicas."""
        with use_context(context_without_rows(step.replica_tokens, self._device.target)):
            for mixture in self._mixtures:
                mixture.take_part(self._dtype, self._device.target)
        self._failed = False
        return SilentStep(step.number)

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Do some work, while no step is under way, that makes later ones quicker -> whether more is left."""
        return self._compute.prepare()

    def lost(self, error: Exception) -> bool:
        """Whether a step failed with this error because the device has, so that no other step can run."""
        return self._device.lost(error)

    def close(self) -> None:
        """Give all memory back. The runner is of no use afterwards."""
        for each in (self._cache, self.store):
            if each is not None:
                each.close()
        self._compute.close()
        groups, device, folder = self._groups, self._device, Path(self._config.folder)
        self.__dict__.clear()  # what it has holds all tensors
        gc.collect()  # some parts refer to each other
        groups.close()
        device.close()
        release_after_loading(folder)

    @property
    def _parameters(self) -> list[Tensor]:
        """The weights of the served model and of its drafter."""
        return [*self._model.parameters(), *(self._drafter.parameters() if self._drafter else ())]

    @property
    def _attention_layers(self) -> list[CachedAttention]:
        """The layers with entries in the cache, those of the drafter last."""
        return [*self._model.attention_layers(), *(self._drafter.attention_layers() if self._drafter else ())]

    def _finish(self, batch: Batch, outcome: Outcome) -> StepHandle:
        """Pool, and start to fetch the output."""
        if self._stage and outcome.tokens:
            self._stage.send_tokens(outcome.tokens.tokens)
        pooled = self._pool(batch, outcome)
        told = self._balancer if self._config.place.returns_outputs else None
        experts = told.take_report() if told else None
        return fetch_output(self._device, batch, outcome.tokens, outcome.prompt_tables, pooled, experts)

    def _make_balancer(self) -> Balancer | None:
        """What moves experts by load, which counts from now on."""
        balancing, place = self._config.balancing, expert_place(self._config)
        if balancing is None or place is None or self._groups.experts is None or not self._mixtures:
            return None
        return Balancer(self._model, place, self._groups.experts, self._config.place.tensor_size, balancing)

    def _make_compute(self, tasks: tuple[str, ...], limits: WorkerLimits) -> Compute:
        if self._drafter is not None:
            packet = Packet(self._device.staging_buffer, limits.staged_words)
            self._drafter.begin(self._slots, packet, self._device.scan, self._device.draw)
            self._cache = replace(self._cache, parts=[*self._cache.parts, *self._drafter.parts])
        if self._stage is not None and self._remembered is not None and self._slots.most_guesses:
            self._stage.tell_all()
        return Compute(
            self._model,
            self._slots,
            vocab_size=self._config.model.vocab_size,
            kills=limits.kills,
            scan=self._device.scan,
            draw=self._device.draw,
            stage=self._stage,
            generates=samples(tasks),
            hidden_store=self._cache.hidden,
            replicas=self._groups.replicas,
            drafter=self._drafter,
        )

    def _make_slots(self, limits: WorkerLimits) -> Slots:
        return Slots(
            self._device.target,
            *(limits.max_num_seqs, limits.max_model_len, limits.block_size),
            paged=self._model.causal,
            has_states=self._states is not None,
            most_guesses=most_guesses(limits, self._config, self._device, self._remembered),
            shares=self._layout.shares,
            on_axes=getattr(find_tower(self._model), "three_axes", False),
            processors=open_processors(self._config, self._device.target, limits.max_num_seqs),
            adapting=self._adapters,
            sources=open_table(
                self._model, limits.max_num_seqs, limits.block_size, self._cache.source_blocks
            ),
        )

    def _make_planner(self) -> StepPlanner:
        sizes = self._cache.size.num_blocks, self._config.model.vocab_size
        pooler, compute = self._model.pooler, self._compute
        return StepPlanner(self._slots, *sizes, pooler, compute.lay_out, compute.forms, self._media)

    def _load(self, limits: WorkerLimits, report: Report) -> tuple[ServedModel, Drafter | None]:
        config, device, parallel = self._config, self._device, parallel_of(self._config, self._groups)
        options = load_options(config, device, self._dtype, parallel, limits.max_model_len)
        model = load_weights(options, device, report)
        self._adapters = hold_adapters(config, options, device, model)
        return model, load_drafter(config, options, device, model, report)

    def _while_loading(self, block_size: int) -> AbstractContextManager[None]:
        """The device's work meanwhile."""
        given = self._config, (self._dtype, self._cache_dtype), block_size
        parallel = parallel_of(self._config, self._groups)
        return self._device.while_loading(*given, parallel, self._groups.minimum)

    def _make_states(
        self, limits: WorkerLimits, tasks: tuple[str, ...]
    ) -> tuple[StateMemory | None, int | None, WorkerLimits]:
        given = state_layers(self._model.modules()), limits, self._config, lambda: self._budget(limits, tasks)
        return make_states(*given, self._groups.minimum, self._device, self._dtype)

    def _keep_media(self, limits: WorkerLimits, tasks: tuple[str, ...]) -> WorkerLimits:
        budget, model, dtype = lambda: self._budget(limits, tasks), self._model, self._dtype
        return keep_media(limits, model, self._config, dtype, budget, self._groups.minimum)

    def _budget(self, limits: WorkerLimits, tasks: tuple[str, ...]) -> CacheBudget:
        """The memory for caches but for kept embeddings; states take theirs first."""
        kept = kept_bytes(self._config, limits, self._model, self._dtype, self._device)
        share, step = self._config.options.gpu_memory_utilization, self._step_bytes(limits, tasks)
        return self._device.cache_budget(share, step).less(kept)

    def _step_bytes(self, limits: WorkerLimits, tasks: tuple[str, ...]) -> int:
        layers, groups = self._attention_layers, len(self._layout.groups)
        sizes = bytes_beside_cache(self._config, limits, self._device, layers, self._dtype, tasks, groups)
        return sizes + input_bytes(self._config, limits, self._model, self._dtype)

    def _lay_out_cache(self, limits: WorkerLimits, tasks: tuple[str, ...]) -> CacheLayout:
        """The places of layers in the cache; where all positions are stored or seen, all blocks are kept."""
        model, asked = self._model, self._config.options
        keeps_all = asked.disable_hybrid_kv_cache_manager or sees_prompts(find_tower(model))
        keeps_all = keeps_all or bool(whole_tasks(tasks, model.pooler))
        layers, minimum = self._attention_layers, self._groups.minimum
        return lay_out_cache(layers, limits, self._cache_dtype, minimum, keeps_all=keeps_all)

    def _make_cache(self, limits: WorkerLimits, tasks: tuple[str, ...]) -> Cache:
        if not self._model.causal:
            return no_cache(limits.max_model_len)
        config, place, model = self._config, self._config.place, self._model
        stores_hidden = bool(whole_tasks(tasks, model.pooler)) and place.stage == place.stages - 1
        budget = self._budget(limits, tasks).less(self._states.nbytes if self._states else 0)
        return make_cache(
            *(config, limits, self._device, model, self._layout, budget, self._dtype, self._groups.minimum),
            stores_hidden=stores_hidden,
            beside=self._drafter.block_bytes if self._drafter else 0,
        )

    def _facts(self, limits: WorkerLimits, tasks: tuple[str, ...]) -> WorkerFacts:
        model, size, tower = self._model, self._cache.size, find_tower(self._model)
        source = find_source_model(model)
        takes_rows, processors = self._config.options.enable_prompt_embeds, self._slots.processors
        return WorkerFacts(
            device=self._device.name,
            dtype=dtype_name(self._dtype),
            block_size=limits.block_size,
            num_blocks=size.num_blocks,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            weight_bytes=sum(parameter.nbytes for parameter in self._parameters),
            kv_bytes=size.num_blocks * size.block_bytes,
            device_bytes=self._device.held_bytes(self._step_bytes(limits, tasks)),
            tasks=tasks,
            windows=self._layout.windows,
            causal=model.causal,
            remembered_states=self._remembered,
            widths=widths(tasks, model.pooler),
            whole_tasks=whole_tasks(tasks, model.pooler),
            fingerprint=self._digests.fingerprint,
            vectors=vector_facts(tasks, model.pooler, self._digests.vectors),
            most_embeddings=limits.most_embeddings if tower or takes_rows else 0,
            row_width=self._config.model.hidden_size if takes_rows else 0,
            media_width=(1 + tower.levels) * self._config.model.hidden_size if tower else 0,
            tower_layers=count_layers(tower),
            kept_embeddings=limits.kept_embeddings,
            most_rows=self._slots.most_guesses if samples(tasks) and processors is None else 0,
            drafts=self._config.drafter.most if self._config.drafter else 0,
            whole_media=sees_media(tower),
            whole_prompts=sees_prompts(tower),
            processes_logits=processors is not None,
            source_kind=source_kind(model),
            source_layers=encoder_layers(source),
            source_len=source.source_len if source else 0,
            source_shape=source.source_shape if source else (0, 0),
            num_source_blocks=self._cache.source_blocks,
            cosine_scores=CosineScores(*found) if (found := getattr(tower, "cosine_scores", None)) else None,
        )

    def _make_ready(self) -> WorkerFacts:
        """Run the first steps and do urgent work; returns the facts with those that are known then."""
        beside = self._cache, self._states
        self.store = open_store(self._config, self.facts, self._device, *beside)
        timed_steps = (self._device.target.type == "cpu" and self._config.timed_steps) or self._warm_up()
        is_left = [self.prepare() for _ in range(self._compute.urgent)]
        return msgspec.structs.replace(
            self.facts,
            timed_steps=timed_steps,
            has_idle_work=bool(is_left and is_left[-1]),
            kernel_compilations=self._device.kernel_compilations,
        )

    def _pool(self, batch: Batch, outcome: Outcome) -> PooledVectors:
        pooled = PooledVectors()
        if (pools := batch.pooled) is not None:
            inputs = gather_hidden(pools, outcome.hidden, self._cache.hidden, self._slots)
            pooled = apply_late_interaction(pools, inputs, self._model.pooler, self._queries)
        if self._aligner is not None:
            self._aligner.finish(batch, pooled)
        return pooled

    def _warm_up(self) -> tuple[tuple[int, float], ...]:
        """Take the first steps -> tokens and seconds of each."""
        if self._media is not None and self._device.target.type != "cpu":
            self._media.warm_up(Path(self._config.folder))
        steps = warm_up_steps(self.facts, self._slots.dummy, self._config.place.expert_replicas)
        return warm_up(steps, lambda step: self.launch(step).result(), self.facts.dtype)
