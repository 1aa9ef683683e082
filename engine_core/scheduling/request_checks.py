"""Refuses options that contradict each other, and requests that the engine cannot hold.

Servers and programs check what a parameter may be (`server/requests/`). Here is what depends on the engine:
ids lie in the vocabulary, the model has the task, and the sequence fits into the cache when it is alone.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from engine_core.config import EngineConfig
from engine_core.protocol import AddRequest
from engine_core.scheduling.cache.cache_manager import blocks_needed
from worker.protocol import Pooling, Sampling
from worker.worker_facts import WorkerFacts

POLICIES = ("fcfs", "priority")


def check_config(config: EngineConfig, facts: WorkerFacts) -> None:
    """Raises ValueError if a scheduler cannot work with these options."""
    if config.steps_ahead is not None and config.steps_ahead < 0:
        raise ValueError(f"steps_ahead is {config.steps_ahead}; it must be 0 or more")
    if config.scheduling_policy not in POLICIES:
        raise ValueError(
            f"scheduling_policy is '{config.scheduling_policy}'; it can be {' or '.join(POLICIES)}"
        )
    whole_prompts = not (config.enable_chunked_prefill and facts.cuts_prompts)
    if whole_prompts and facts.max_num_batched_tokens < facts.max_model_len:
        raise ValueError(
            f"without chunked prefill a step must hold a whole prompt: set --max-num-batched-tokens (now "
            f"{facts.max_num_batched_tokens}) to at least --max-model-len ({facts.max_model_len})"
        )


def token_limit(add: AddRequest, facts: WorkerFacts) -> int:
    """The number of tokens, the prompt's included, at which a sequence ends. A pooled one ends earlier."""
    if isinstance(add.params, Pooling):
        return len(add.tokens) + 1
    return min((add.prompt_len or len(add.tokens)) + add.params.max_tokens, facts.max_model_len)


def refusal(add: AddRequest, facts: WorkerFacts, vocab_size: int) -> str | None:
    """The reason why the request cannot be run, or None if it can."""
    if reason := _bad_length(add, facts):
        return reason
    if not all_within(add.tokens, vocab_size):
        return f"the prompt has token ids outside of the vocabulary, which is 0 to {vocab_size - 1}"
    # The last token is never an input, so it needs no position in the cache.
    needed = blocks_needed(token_limit(add, facts) - 1, facts)
    if needed > facts.num_blocks:
        return (
            f"prompt and max_tokens need {needed} blocks of the KV cache, and it has {facts.num_blocks}: "
            "ask for fewer tokens"
        )
    if isinstance(add.params, Pooling):
        return _bad_pooling(add.params, facts)
    return _bad_sampling(add.params, vocab_size, facts)


def full_queue(queued: int, most: int | None) -> str | None:
    """The reason why no request more can wait behind so many, or None if it can."""
    return f"{queued} requests wait already" if most is not None and queued >= most else None


def _bad_length(add: AddRequest, facts: WorkerFacts) -> str | None:
    count, longest = len(add.tokens), facts.max_model_len
    if not count:
        return "the prompt is empty: give at least one token"
    if isinstance(add.params, Pooling):
        if add.prompt_len:
            return "a text to be pooled has no tokens that were emitted before: prompt_len must be 0"
        return (
            f"the text has {count} tokens, and at most {longest} fit: shorten it" if count > longest else None
        )
    if add.prompt_len:
        # One with a grammar may have all its tokens, and not be told yet whether the last completes it.
        most = token_limit(add, facts) - (add.grammar is None)
        if 0 < add.prompt_len < count <= most:
            return None
        return f"{add.prompt_len} of {count} tokens cannot be the prompt of an answer that goes on"
    if count >= longest:
        return (
            f"the prompt has {count} tokens, and the model's {longest} must hold it "
            "and at least one more: shorten the prompt"
        )
    return None


def _bad_pooling(params: Pooling, facts: WorkerFacts) -> str | None:
    if params.task not in facts.tasks:
        return f"this model has no task {params.task}; it has {', '.join(facts.tasks)}"
    if unknown := [task for task in params.outputs if task not in facts.tasks]:
        return f"this model has no vectors of the task {unknown[0]}; it has {', '.join(facts.tasks)}"
    if (params.outputs or params.spans) and facts.causal and not facts.whole_tasks:
        return "hidden states of whole texts are not kept: offer token_embed, too (--tasks)"
    return None


def _bad_sampling(params: Sampling, vocab_size: int, facts: WorkerFacts) -> str | None:
    if "generate" not in facts.tasks and "transcription" not in facts.tasks:
        return f"this model does not generate; its tasks are {', '.join(facts.tasks)}"
    for name, ids in _named_ids(params).items():
        if ids and not all_within(ids, vocab_size):
            return f"{name} has token ids outside of the vocabulary, which is 0 to {vocab_size - 1}"
    return None


def _named_ids(params: Sampling) -> dict[str, Collection[int]]:
    rules = params.timestamps
    return {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "logit_bias": params.logit_bias,
        "told": params.told,
        "suppressed": params.suppressed,
        "suppressed_first": params.suppressed_first,
        "timestamps": () if rules is None else (rules.first, rules.end, rules.none),
        "bad_words": [*chain(*params.bad_words)],
    }


def all_within(ids: Collection[int], vocab_size: int) -> bool:
    """Say whether all ids lie in the vocabulary."""
    return not ids or (min(ids) >= 0 and max(ids) < vocab_size)
