"""Beam search: what a program may ask of it, and the parameters with which engines run it."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from engine_core.beams.beam_params import BeamParams
from server.errors import BadRequest, invalid
from server.model_facts import Facts
from server.requests.sampling import SamplingParams
from server.source_facts import refuse_for_sources
from worker.protocol import Sampling

_UNKNOWN = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words"),
    *("allowed_token_ids", "min_tokens", "stop", "prompt_logprobs", "structured_outputs"),
)
"""The parameters that a beam search does not obey. Those of the draw have no meaning here."""
_NEUTRAL = (None, 0, "", [], {})


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
        width = self.beam_width
        return BeamParams(width, width, self.length_penalty, logprobs=2 * width)


def search_params(
    beams: BeamParams, asked: SamplingParams, params: list[Sampling], facts: Facts
) -> tuple[BeamParams, list[Sampling]]:
    """What an engine is told of a beam search, in place of `params`, which `asked` resolves to.

    Raises BadRequest if more is asked than it obeys.
    """
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
    if not 1 <= beams.width <= most:
        raise invalid(
            "n", f"the width of a beam search must be from 1 to {most}, got {beams.width}.", beams.width
        )
    resolved = params[0]
    shown = beams.logprobs if resolved.logprobs is None else resolved.logprobs
    count = -1 if shown == -1 else max(beams.candidates, shown or 0)
    stops, longest = resolved.stop_token_ids, resolved.max_tokens
    row = Sampling(longest, temperature=0.0, stop_token_ids=stops, logprobs=count)
    return replace(beams, logprobs=shown), [row] * len(params)
