"""Runner: a model on a device that takes steps. Orchestration only; tensors are the other modules' business.

`launch` never waits for the device and may be called again before the last step's result is read:
everything a step needs of earlier ones is on the device already.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from models.context import use_context
from models.loader import load_model
from models.model import CausalLM
from worker.batch import Batch, build
from worker.config import WorkerConfig
from worker.device import Device, choose_dtype, dtype_name, open_device
from worker.kv import bind_cache, block_bytes, size_cache, step_bytes
from worker.limits import Limits, resolve_limits
from worker.logprobs import rank_prompt
from worker.output import Handle, send_back
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput, WorkerFacts
from worker.sampler import Choice, choose
from worker.slots import Slots
from worker.staging import Staging

logger = logging.getLogger(__name__)

WARMUP_TOKENS = 16


class Runner:
    def __init__(self, config: WorkerConfig, report: Callable[[str, float], None]) -> None:
        self._device = open_device(config)
        dtype = choose_dtype(config, self._device)
        limits = resolve_limits(config, self._device.defaults)
        self._vocab_size = config.model.vocab_size
        self._model = _load(config, limits, self._device, dtype, report)

        report("cache", 0.0)
        layers = self._model.attention_layers()
        size = size_cache(
            config,
            limits,
            block_bytes(layers, limits.block_size, dtype),
            self._device.cache_budget(config.gpu_memory_utilization, step_bytes(config.model, limits, dtype)),
            self._device.cache_flag,
        )
        limits = replace(limits, max_model_len=size.max_model_len)
        bind_cache(size, layers, limits.block_size, dtype, self._device)
        self._slots = Slots(self._device.target, limits.max_num_seqs, limits.max_model_len, limits.block_size)
        self._staging = Staging(
            self._device, config.steps_ahead, 4 * (limits.max_num_batched_tokens + 8 * limits.max_num_seqs)
        )
        report("cache", 1.0)

        self.facts = WorkerFacts(
            device=self._device.name,
            dtype=dtype_name(dtype),
            block_size=limits.block_size,
            num_blocks=size.num_blocks,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            weight_bytes=sum(parameter.nbytes for parameter in self._model.parameters()),
            kv_bytes=size.num_blocks * size.block_bytes,
        )
        report("warmup", 0.0)
        self._warm_up()
        report("warmup", 1.0)
        logger.info("ready: %s", self.facts)

    @torch.inference_mode()
    def launch(self, step: StepInput) -> Handle:
        batch = build(
            step,
            self._slots,
            self._staging.open(),
            num_blocks=self.facts.num_blocks,
            vocab_size=self._vocab_size,
        )
        with use_context(batch.context):
            hidden = self._model.forward(batch.ids, batch.context.positions)
        prompt_tables = [
            rank_prompt(hidden, wanted, self._model.logits, self._vocab_size) for wanted in batch.prompts
        ]
        choice = self._sample(batch, hidden)
        return send_back(self._device, step, batch, choice, prompt_tables)

    def close(self) -> None:
        """Give the cache back. The runner is of no use afterwards."""
        for layer in self._model.attention_layers():
            layer.kv = None
        self._device.close()

    def _sample(self, batch: Batch, hidden: Tensor) -> Choice | None:
        sampled = batch.sampled
        if sampled is None:
            return None
        logits = self._model.logits(hidden[sampled.at])
        choice = choose(logits, sampled.plan, self._slots.tokens, reads_at_once=self._device.reads_at_once)
        self._slots.tokens[sampled.slots, sampled.positions] = choice.tokens.int()
        return choice

    def _warm_up(self) -> None:
        """One real prefill and decode, in the row and the cache block that no sequence uses."""
        row, scratch = self._slots.dummy, self.facts.num_blocks
        length = min(WARMUP_TOKENS, self.facts.max_model_len - 1)
        blocks = [scratch] * -(-(length + 1) // self.facts.block_size)
        params = Sampling(max_tokens=2, top_p=0.9)
        new = NewSeq(slot=row, tokens=[0] * length, prompt_len=length, params=params)
        prefill = SeqStep(slot=row, start=0, count=length, blocks=blocks, samples=True)
        decode = SeqStep(slot=row, start=length, count=1, blocks=[], samples=True, output_index=1)
        for step in (
            StepInput(number=0, new=[new], seqs=[prefill]),
            StepInput(number=0, new=[], seqs=[decode]),
        ):
            for reason in self.launch(step).result().failed.values():
                logger.warning("at warm-up, %s: --dtype %s may be too narrow", reason, self.facts.dtype)


def _load(
    config: WorkerConfig,
    limits: Limits,
    device: Device,
    dtype: torch.dtype,
    report: Callable[[str, float], None],
) -> CausalLM:
    return load_model(
        config.model,
        Path(config.folder),
        device=device.target,
        dtype=dtype,
        load_format=config.load_format,
        model_impl=config.model_impl,
        trust_remote_code=config.trust_remote_code,
        max_len=limits.max_model_len,
        report=lambda fraction: report("weights", fraction),
    )
