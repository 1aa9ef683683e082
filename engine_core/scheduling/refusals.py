"""What the engine refuses: options that contradict each other, and requests that could make a step fail.

Requests are checked again, whatever a server has checked before. Past these checks nothing in a request can
make a step fail for others: every id lies in the vocabulary, every number is finite and in range, and the
sequence fits into the cache when it is alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import isfinite

from engine_core.config import EngineConfig
from engine_core.protocol import Add, Thinking
from engine_core.scheduling.cache.cache_manager import blocks_needed
from worker.protocol import Pooling, Sampling
from worker.worker_facts import WorkerFacts

POLICIES = ("fcfs", "priority")
_LARGEST_INT32 = 2**31 - 1
_VECTORS = ("embed", "token_embed", "sparse_embed")
"""The tasks of which a sequence may have several answers."""


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


def token_limit(add: Add, facts: WorkerFacts) -> int:
    """The number of tokens, the prompt's included, at which a sequence ends. A pooled one ends earlier."""
    if isinstance(add.params, Pooling):
        return len(add.tokens) + 1
    return min((add.prompt_len or len(add.tokens)) + add.params.max_tokens, facts.max_model_len)


def refusal(add: Add, facts: WorkerFacts, vocab_size: int) -> str | None:
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
        if add.grammar is not None or add.thinking is not None:
            return "a text that is pooled has no answer: it takes no grammar and no thinking budget"
        return _bad_pooling(add.params, len(add.tokens), facts)
    if add.thinking is not None and (reason := _bad_thinking(add.thinking, vocab_size)):
        return reason
    return _bad_sampling(add.params, vocab_size, facts)


def _bad_length(add: Add, facts: WorkerFacts) -> str | None:
    count, longest = len(add.tokens), facts.max_model_len
    if not count:
        return "the prompt is empty: give at least one token"
    if isinstance(add.params, Pooling):
        if add.prompt_len:
            return "a text to be pooled has no tokens that were emitted before: prompt_len must be 0"
        return (
            f"the text has {count} tokens, and at most {longest} fit: shorten it" if count > longest else None
        )
    if add.prompt_len and not 0 < add.prompt_len < count < token_limit(add, facts):
        return f"{add.prompt_len} of {count} tokens cannot be the prompt of an answer that goes on"
    if count >= longest:
        return (
            f"the prompt has {count} tokens, and the model's {longest} must hold it "
            "and at least one more: shorten the prompt"
        )
    return None


def _bad_pooling(params: Pooling, count: int, facts: WorkerFacts) -> str | None:
    if params.task not in facts.tasks:
        return f"this model has no task {params.task}; it has {', '.join(facts.tasks)}"
    if bad := _bad_outputs(params, count, facts):
        return bad
    if params.dimensions is not None:
        width = facts.widths.get(params.task)
        if width is None or params.task not in ("embed", "token_embed"):
            return f"dimensions is for vectors, and the task {params.task} gives scores: leave it out"
        if not 1 <= params.dimensions <= width:
            return f"dimensions must be from 1 to {width}, got {params.dimensions}"
    if not 0 <= params.second_at <= count:
        return f"second_at must lie within the text's {count} tokens, got {params.second_at}"
    if not 0 <= params.skip <= count:
        return f"skip must lie within the text's {count} tokens, got {params.skip}"
    if not 0 <= params.columns <= facts.source_len:
        return f"columns must be from 0 to the {facts.source_len} of a source, got {params.columns}"
    if (params.late_query or params.late_document) and params.task != "token_embed":
        return f"late interaction compares vectors of tokens: its task is token_embed, not {params.task}"
    if params.late_query and params.late_document:
        return "a text is late_query or late_document, not both"
    return None


def _bad_outputs(params: Pooling, count: int, facts: WorkerFacts) -> str | None:
    if unknown := [task for task in params.outputs if task not in facts.tasks or task not in _VECTORS]:
        return f"this model has no vectors of the task {unknown[0]}; it has {', '.join(facts.tasks)}"
    if params.outputs and (params.task not in _VECTORS or params.task in params.outputs):
        return f"outputs are other vectors than those of the task {params.task}"
    if (params.outputs or params.spans) and facts.causal and not facts.whole_tasks:
        return "hidden states of whole texts are not kept: offer token_embed, too (--tasks)"
    if params.unseen and (facts.causal or not 0 < params.unseen < count):
        return f"an encoder does not see some of the text's {count} tokens, but not {params.unseen} of them"
    if any(not 0 <= start < stop <= count for start, stop in params.spans):
        return f"spans must lie within the text's {count} tokens, and have some"
    if params.labels if params.task != "ner" else not 0 < params.labels < len(params.spans):
        return "the task ner, and no other, has spans of labels, and behind them of words"
    return None


def _bad_thinking(thinking: Thinking, vocab_size: int) -> str | None:
    if thinking.budget is not None and thinking.budget < 0:
        return f"the thinking budget must be 0 or more, got {thinking.budget}"
    sequences = (thinking.marker, *thinking.opens, *thinking.ends)
    if not all(sequences):
        return "a sequence of tokens that opens or ends thinking is empty: give at least one token"
    if not all(all_within(each, vocab_size) for each in sequences):
        return f"a marker of thinking has token ids outside of the vocabulary, which is 0 to {vocab_size - 1}"
    return None


def _bad_sampling(params: Sampling, vocab_size: int, facts: WorkerFacts) -> str | None:
    if "generate" not in facts.tasks and "transcription" not in facts.tasks:
        return f"this model does not generate; its tasks are {', '.join(facts.tasks)}"
    if params.max_tokens < 1:
        return f"max_tokens must be at least 1, got {params.max_tokens}"
    if not 0 <= params.min_tokens <= params.max_tokens:
        return f"min_tokens must be from 0 to max_tokens ({params.max_tokens}), got {params.min_tokens}"
    if not params.temperature >= 0 or not isfinite(params.temperature):
        return f"temperature must be finite and not negative, got {params.temperature}"
    if not 0 < params.top_p <= 1:
        return f"top_p must be above 0 and at most 1, got {params.top_p}"
    if not 0 <= params.min_p <= 1:
        return f"min_p must be from 0 to 1, got {params.min_p}"
    if not 0 <= params.top_k <= _LARGEST_INT32:
        return f"top_k must be from 0 (off) to {_LARGEST_INT32}, got {params.top_k}"
    if not params.repetition_penalty > 0:
        return f"repetition_penalty must be above 0, got {params.repetition_penalty}"
    numbers = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    if not all(map(isfinite, numbers)) or not all(map(isfinite, params.logit_bias.values())):
        return "penalties and logit_bias values must be finite"
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count < -1:
            return f"{name} must be -1 (the whole vocabulary) or more, got {count}"
    if (params.told or params.masked_logprobs) and params.logprobs is None:
        return "tokens are told, and masks are seen, in logprobs only: ask for 0 or more"
    if not all(params.bad_words):
        return "bad_words has an empty sequence: give each at least one token"
    for name, ids in _named_ids(params):
        if not all_within(ids, vocab_size):
            return f"{name} has token ids outside of the vocabulary, which is 0 to {vocab_size - 1}"
    return None


def _named_ids(params: Sampling) -> Iterable[tuple[str, Collection[int]]]:
    yield "stop_token_ids", params.stop_token_ids
    yield "allowed_token_ids", params.allowed_token_ids
    yield "logit_bias", params.logit_bias
    yield "told", params.told
    yield "suppressed", params.suppressed
    yield "suppressed_first", params.suppressed_first
    if (rules := params.timestamps) is not None:
        yield "timestamps", (rules.first, rules.end, rules.none)
    for words in params.bad_words:
        yield "bad_words", words


def all_within(ids: Collection[int], vocab_size: int) -> bool:
    """Say whether all ids lie in the vocabulary."""
    return not ids or (min(ids) >= 0 and max(ids) < vocab_size)
