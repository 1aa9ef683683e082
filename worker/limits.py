"""The sizes a worker runs with: those the operator asked for, the rest from the device and the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from worker.capacity import LEAST_ROWS, WorkerLimits
from worker.config import WorkerConfig
from worker.devices.base import Defaults, Device
from worker.host.machine import times_killed
from worker.options import WorkerOptions

logger = logging.getLogger(__name__)

_TOKENS_BY_KILL = 4
"""The divisor of a step's tokens for each worker that was killed because memory ran out: half as many would
often change nothing, since steps on a CPU rarely have as many as they may."""


def resolve_limits(config: WorkerConfig, device: Device) -> WorkerLimits:
    asked = config.options
    pools = config.conversion.runner == "pooling"
    defaults = device.pooling_defaults if pools else device.defaults
    for flag, value, least in (
        ("--block-size", asked.block_size, 1),
        ("--max-num-seqs", asked.max_num_seqs, 1),
        ("--max-num-batched-tokens", asked.max_num_batched_tokens, 1),
        ("--max-model-len", asked.max_model_len, 2),  # a prompt token and one to answer it
        ("--num-gpu-blocks-override", asked.num_gpu_blocks_override, 1),
        ("--cpu-threads", asked.cpu_threads, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{flag} must be at least {least}, not {value}")
    seqs, tokens = _batch_sizes(asked, defaults)
    return WorkerLimits(asked.block_size or defaults.block_size, seqs, tokens, _model_len(config))


def _batch_sizes(asked: WorkerOptions, defaults: Defaults) -> tuple[int, int]:
    """A step must have room for one token of every sequence: the size that was not given is adapted."""
    seqs, tokens = asked.max_num_seqs, asked.max_num_batched_tokens
    if tokens is None:
        seqs = seqs or defaults.max_num_seqs
        return seqs, max(seqs, defaults.max_num_batched_tokens)
    if seqs is None:
        return min(tokens, defaults.max_num_seqs), tokens
    if tokens < seqs:
        raise ValueError(
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {seqs}, so a step could not give "
            "every sequence a token: raise the first or lower the second"
        )
    return seqs, tokens


def agree(limits: WorkerLimits, minimum: Callable[[int], int]) -> WorkerLimits:
    """The sizes that the smallest of all ranks' devices can hold. `minimum`: that of all ranks' numbers."""
    seqs, tokens = minimum(limits.max_num_seqs), minimum(limits.max_num_batched_tokens)
    return replace(limits, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def fit_whole_sequences(limits: WorkerLimits, config: WorkerConfig) -> WorkerLimits:
    """Give a step room for the longest sequence, for models that compute a sequence or its prompt whole."""
    if limits.max_num_batched_tokens >= limits.max_model_len:
        return limits
    if config.options.max_num_batched_tokens is not None:
        raise ValueError(
            f"--max-num-batched-tokens {config.options.max_num_batched_tokens} is less than --max-model-len "
            f"({limits.max_model_len}), and this model reads a text in one step: raise the first or "
            "lower the second"
        )
    return replace(limits, max_num_batched_tokens=limits.max_model_len)


def take_less(
    limits: WorkerLimits, config: WorkerConfig, minimum: Callable[[int], int], *, whole: bool
) -> WorkerLimits:
    """Smaller sizes for a worker in whose place others were killed because memory ran out; all ranks agree.

    Steps have fewer tokens, but room for one of every sequence, and for a prompt if prompts are read `whole`.
    """
    kills = -minimum(-times_killed(config.run_folder, config.place.name))
    most = limits.max_num_batched_tokens
    prompt = limits.max_model_len if whole or config.whole_prompts else 0
    least = max(limits.max_num_seqs, LEAST_ROWS, prompt)
    tokens = max(most // _TOKENS_BY_KILL**kills, min(most, least))
    if kills and config.place.rank == 0:
        logger.warning(
            "workers killed before this one because memory ran out: %d; it takes less: %d tokens in a step, "
            "not %d, and log-probabilities of prompts in smaller pieces",
            *(kills, tokens, most),
        )
    return replace(limits, max_num_batched_tokens=tokens, kills=kills)


def _model_len(config: WorkerConfig) -> int:
    longest, asked = config.model.max_len, config.options.max_model_len
    if asked is not None and asked > longest and not config.model.any_length:
        raise ValueError(
            f"--max-model-len {asked} is more than the {longest} positions this model was "
            "made for: lower it, or extend the model's positions with --hf-overrides"
        )
    # The length to which sentence-transformers cuts texts is that of the training; the model can hold more.
    trained = config.pooling.texts.max_len if config.conversion.runner == "pooling" else None
    return asked or min(longest, trained or longest)
