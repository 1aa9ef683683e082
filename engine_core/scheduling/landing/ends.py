"""The answers to a sequence: its new tokens, when they are the last, and the end of one that is aborted."""

from __future__ import annotations

from engine_core.protocol import Failed, Finish, Pooled, Tokens
from engine_core.scheduling.sequence import Sequence
from worker.protocol import Sampling, TokenLogprobs, Vectors


def new_tokens(
    seq: Sequence,
    token: int,
    logprobs: TokenLogprobs | None,
    finish: Finish | None,
    *,
    first: bool,
    now: float,
) -> Tokens:
    """The message with the token just appended."""
    return Tokens(
        id=seq.key[1],
        tokens=[token],
        logprobs=[] if logprobs is None else [logprobs],
        prompt_logprobs=seq.prompt_logprobs if first and seq.wants_prompt_logprobs else None,
        cached=seq.cached if first else 0,
        miss=seq.miss if first else None,
        finish=finish,
        timing=seq.timing(now) if finish or seq.request.times_each else None,
        expected=seq.expected if first else None,
    )


def pooled(seq: Sequence, vectors: Vectors, now: float) -> Pooled:
    return Pooled(seq.key[1], vectors, seq.cached, seq.timing(now), seq.expected, seq.miss)


def aborted(seq: Sequence, now: float) -> Tokens | Failed:
    """The last answer to a request that nobody waits for any more."""
    if seq.pools:
        return Failed(id=seq.key[1], code=503, message="the request was ended before it was done")
    return Tokens(id=seq.key[1], tokens=[], finish="abort", timing=seq.timing(now))


def finish_reason(seq: Sequence, token: int) -> Finish | None:
    """The reason for which the token just appended is the last one, or None if it is not."""
    params = seq.request.params
    outputs_before = len(seq.tokens) - 1 - seq.prompt_len
    if (
        isinstance(params, Sampling)
        and token in params.stop_token_ids
        and outputs_before >= params.min_tokens
    ):
        return "stop"
    if seq.matcher is not None and seq.matcher.complete:
        return "stop"
    return "length" if len(seq.tokens) >= seq.limit else None
