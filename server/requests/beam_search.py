"""Beam search: what a client may ask of it, and the rules of a search for that."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from engine_core.client.in_flight import AddOptions
from server.errors import BadRequest, invalid, refuse_for_sources
from server.model_facts import Facts
from server.requests.beam_rounds import BeamParams, BeamRules
from server.requests.sampling_params import SamplingParams
from worker.protocol import Sampling

_UNKNOWN = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words"),
    *("allowed_token_ids", "min_tokens", "stop", "prompt_logprobs", "structured_outputs"),
    "repetition_detection",
)
"""The parameters that a beam search does not obey. Those of the draw have no meaning here."""
_NEUTRAL = (None, 0, "", [], {})
_MOST_LENGTH_PENALTY = 10


class BeamSearchParams(msgspec.Struct):
    """The search of `LLM.beam_search`, with vLLM's fields."""

    beam_width: int
    """The number of answers that are followed at a time, and of those that are found."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Without effect, because nothing is drawn: answers are compared by the model's own logprobs."""
    length_penalty: float = 1.0
    """An answer's score is the sum of its logprobs by its length, the prompt's included, to this power."""
    include_stop_str_in_output: bool = False
    """Whether the text has that of the stop token."""

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )

    def beams(self) -> BeamParams:
        return BeamParams(self.beam_width, self.length_penalty, logprobs=2 * self.beam_width)


def read_rules(
    params: BeamParams,
    asked: SamplingParams,
    resolved: Sampling,
    prompt_len: int,
    facts: Facts,
    options: AddOptions = AddOptions(),
) -> BeamRules:
    """The rules of a search for answers to a prompt, for which `asked` resolves to `resolved`.

    Raises BadRequest if more is asked, or held to by `options`, than a search obeys.
    """
    if options.get("grammar") is not None or options.get("thinking") is not None:
        raise BadRequest(
            "beam search takes no grammar and no thinking budget: leave them, or the search, out.",
            "use_beam_search",
        )
    if facts.sources is not None:
        refuse_for_sources(use_beam_search=True)
    if facts.ready.worker.processes_logits:
        raise BadRequest(
            "beam search does not go with --logits-processors, which this server has.", "use_beam_search"
        )
    for name in _UNKNOWN:
        value = getattr(asked, name)
        if value not in _NEUTRAL and (name, value) != ("repetition_penalty", 1.0):
            raise BadRequest(f"beam search does not support `{name}`: leave it out.", name)
    most = min(facts.limits.n, facts.ready.worker.max_num_seqs)
    if not 1 <= params.width <= most:
        raise invalid(
            "n", f"the width of a beam search must be from 1 to {most}, got {params.width}.", params.width
        )
    if not abs(params.length_penalty) <= _MOST_LENGTH_PENALTY:
        most = _MOST_LENGTH_PENALTY
        raise invalid(
            "length_penalty",
            f"length_penalty must be from -{most} to {most}, got {params.length_penalty}.",
            params.length_penalty,
        )
    shown = params.logprobs if resolved.logprobs is None else resolved.logprobs
    limit = min(prompt_len + resolved.max_tokens, facts.ready.worker.max_model_len)
    return BeamRules(replace(params, logprobs=shown), frozenset(resolved.stop_token_ids), prompt_len, limit)
