"""Runner: a model on a device that takes steps. Orchestration only; tensors are the other modules' business.

`launch` never waits for the device and may be called again before the last step's result is read:
everything a step needs of earlier ones is on the device already.

A model may be spread over ranks. Each has a runner that takes the same steps; those of the last stage sample
and pool, and one of them answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from models.context import use_context
from models.loader import LoadOptions, load_model
from models.model import ServedModel
from models.parallel.parallel import Parallel
from worker.batch import Batch, build
from worker.config import WorkerConfig
from worker.devices.selection import choose_dtype, dtype_name, open_device
from worker.host.memory import PageToucher, release_after_loading
from worker.kv import CacheSize, bind_cache, block_bytes, size_cache, step_bytes
from worker.limits import Limits, agree, hold_whole_sequences, resolve_limits
from worker.output import Handle, send_back
from worker.pooling.hidden import HiddenStore
from worker.pooling.late_interaction import Queries
from worker.pooling.plan import Pooled, answer, gather, offered_tasks, whole_tasks, widths
from worker.protocol import StepInput, WorkerFacts
from worker.ranks.groups import meet
from worker.ranks.stage import Stage, Unheard
from worker.sampling.logprobs import rank_prompt
from worker.sampling.sampler import Choice, choose
from worker.tables.slots import Slots
from worker.tables.staging import Staging
from worker.warmup import warm_up_steps

logger = logging.getLogger(__name__)


class Runner:
    def __init__(self, config: WorkerConfig, report: Callable[[str, float], None]) -> None:
        place = config.place
        self._answers = place.answers
        self._device = open_device(config)
        self._dtype = choose_dtype(config, self._device)
        limits = resolve_limits(config, self._device)
        self._groups = meet(place, self._device.open_group, self._device.target)
        limits = agree(limits, self._groups.least)
        steps_behind = config.steps_ahead + place.stages - 1  # that may be under way when one starts
        self._stage = self._open_stage(config, steps_behind)
        self._vocab_size = config.model.vocab_size
        self._model = self._load(config, limits, report)
        self._device.after_loading(self._model.parameters())
        release_after_loading(Path(config.folder))
        tasks = offered_tasks(config, self._model.pooler)
        whole = whole_tasks(tasks, self._model.pooler)

        report("cache", 0.0)
        if not self._model.causal:
            limits = hold_whole_sequences(limits, config)
        size = self._make_cache(config, limits, keeps_hidden=bool(whole), pools=tasks != ("generate",))
        limits = replace(limits, max_model_len=size.max_model_len)
        self._slots = Slots(
            self._device.target,
            limits.max_num_seqs,
            limits.max_model_len,
            limits.block_size,
            paged=self._model.causal,
        )
        self._staging = Staging(
            self._device.staging_buffer,
            steps_behind,
            4 * (limits.max_num_batched_tokens + 8 * limits.max_num_seqs),
        )
        self._queries = Queries()
        self._lay_out, self._forward = self._device.captured(
            self._model.forward, self._slots, replays=place.size == 1
        )
        report("cache", 1.0)

        self.facts = WorkerFacts(
            device=self._device.name,
            dtype=dtype_name(self._dtype),
            block_size=limits.block_size,
            num_blocks=size.num_blocks,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            weight_bytes=sum(parameter.nbytes for parameter in self._model.parameters()),
            kv_bytes=size.num_blocks * size.block_bytes,
            tasks=tasks,
            causal=self._model.causal,
            widths=widths(tasks, self._model.pooler),
            whole_tasks=whole,
        )
        report("warmup", 0.0)
        self._warm_up()
        if self._page_toucher is not None:
            self._page_toucher.start()
        report("warmup", 1.0)
        logger.debug("ready: %s", self.facts)

    @torch.inference_mode()
    def launch(self, step: StepInput) -> Handle | Unheard:
        if self._page_toucher is not None:
            self._page_toucher.follow(step)
        stage = self._stage
        if stage:
            stage.catch_up(step, self._slots.tokens)
        batch = build(
            step,
            self._slots,
            self._staging.open(),
            num_blocks=self.facts.num_blocks,
            vocab_size=self._vocab_size,
            needs_all_rows=self._model.pooler.needs_all_rows,
            lay_out=self._lay_out,
        )
        stream = stage.receive(len(batch.ids)) if stage else None
        with use_context(batch.context):
            hidden = self._forward(batch.ids, batch.context.positions, stream)
        if stage and not stage.last:
            stage.pass_on(hidden, step, batch.sampled)
            return Unheard(step.number)
        handle = self._finish(step, batch, hidden)
        return handle if self._answers else Unheard(step.number)

    def close(self) -> None:
        """Give the cache back. The runner is of no use afterwards."""
        if self._page_toucher is not None:
            self._page_toucher.close()
        for layer in self._model.attention_layers():
            layer.kv = None
        self._hidden = None
        self._groups.close()
        self._device.close()

    def _finish(self, step: StepInput, batch: Batch, hidden: Tensor) -> Handle:
        """From the last hidden states of a step to what it answers."""
        if self._hidden is not None:
            self._hidden.write(hidden, batch.context)
        prompt_tables = [
            rank_prompt(hidden, wanted, self._model.logits, self._vocab_size) for wanted in batch.prompts
        ]
        choice = self._sample(batch, hidden)
        pooled = self._pool(batch, hidden)
        return send_back(self._device, step, batch, choice, prompt_tables, pooled)

    def _open_stage(self, config: WorkerConfig, steps_behind: int) -> Stage | None:
        links = self._groups.links
        if links is None:
            return None
        return Stage(
            config.place,
            links,
            width=config.model.hidden_size,
            dtype=self._dtype,
            target=self._device.target,
            in_flight=steps_behind + 1,
        )

    def _load(
        self, config: WorkerConfig, limits: Limits, report: Callable[[str, float], None]
    ) -> ServedModel:
        place = config.place
        options = LoadOptions(
            config.model,
            Path(config.folder),
            device=self._device.target,
            dtype=self._dtype,
            load_format=config.options.load_format,
            seed=config.options.seed,
            model_impl=config.options.model_impl,
            trust_remote_code=config.options.trust_remote_code,
            parallel=Parallel(
                place.tensor_rank, place.tensor_size, self._groups.tensor, place.stage, place.stages
            ),
            max_len=limits.max_model_len,
            conversion=config.conversion,
            pooling=config.pooling,
            report=lambda fraction: report("weights", fraction),
        )
        return load_model(options)

    def _make_cache(
        self, config: WorkerConfig, limits: Limits, *, keeps_hidden: bool, pools: bool
    ) -> CacheSize:
        self._hidden: HiddenStore | None = None
        self._page_toucher: PageToucher | None = None
        if not self._model.causal:
            return CacheSize(0, 0, limits.max_model_len)
        device, dtype, layers = self._device, self._dtype, self._model.attention_layers()
        keeps_hidden = keeps_hidden and config.place.stage == config.place.stages - 1
        width = config.model.output_size if keeps_hidden else 0
        step = step_bytes(config.model, limits, layers, dtype, pools=pools, ranks=config.place.tensor_size)
        size = size_cache(
            config,
            limits,
            block_bytes(layers, limits.block_size, dtype)
            + HiddenStore.block_bytes(limits.block_size, width, dtype),
            device.cache_budget(config.options.gpu_memory_utilization, step),
            device.cache_flag,
            self._groups.least,
        )
        parts = bind_cache(size, layers, limits.block_size, dtype, device)
        self._page_toucher = device.page_toucher(parts, size.num_blocks)
        if keeps_hidden:
            self._hidden = HiddenStore(size.num_blocks, limits.block_size, width, dtype, device.allocate)
        return size

    def _sample(self, batch: Batch, hidden: Tensor) -> Choice | None:
        sampled = batch.sampled
        if sampled is None:
            return None
        logits = self._model.logits(hidden if sampled.at is None else hidden[sampled.at])
        device, texts = self._device, self._slots.tokens
        choice = choose(logits, sampled.plan, texts, device.scan, may_sync=device.may_sync)
        tokens = choice.tokens
        texts.view(-1)[sampled.places] = tokens
        if self._stage:
            self._stage.tell(tokens)
        return choice

    def _pool(self, batch: Batch, hidden: Tensor) -> Pooled:
        plan = batch.pooled
        if plan is None:
            return Pooled()
        vectors = self._model.pooler(gather(plan, hidden, batch.ids, self._hidden, self._slots))
        return answer(plan, vectors, self._queries)

    def _warm_up(self) -> None:
        for step in warm_up_steps(self.facts, row=self._slots.dummy):
            for reason in self.launch(step).result().failed.values():
                logger.warning("at warm-up, %s: --dtype %s may be too narrow", reason, self.facts.dtype)
