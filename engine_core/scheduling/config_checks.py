"""Checks of options that contradict each other, or what the worker has found."""

from __future__ import annotations

from engine_core.config import EngineConfig
from worker.protocol import WorkerFacts

POLICIES = ("fcfs", "priority")


def check_config(config: EngineConfig, facts: WorkerFacts) -> None:
    """Raises ValueError if a scheduler cannot work with these options."""
    if config.steps_ahead is not None and config.steps_ahead < 0:
        raise ValueError(f"steps_ahead is {config.steps_ahead}; it must be 0 or more")
    if config.scheduling_policy not in POLICIES:
        raise ValueError(
            f"scheduling_policy is '{config.scheduling_policy}'; it can be {' or '.join(POLICIES)}"
        )
    if (
        not (config.enable_chunked_prefill and facts.causal)
        and facts.max_num_batched_tokens < facts.max_model_len
    ):
        raise ValueError(
            f"without chunked prefill a step must hold a whole prompt: set --max-num-batched-tokens (now "
            f"{facts.max_num_batched_tokens}) to at least --max-model-len ({facts.max_model_len})"
        )
