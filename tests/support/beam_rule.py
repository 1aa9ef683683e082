"""The rule of vLLM's beam search, as a plain program without a cache, by which searches are judged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from server.requests.beam_search import Beam, BeamParams

Likely = Callable[[list[int], int], Iterable[tuple[int, float]]]
"""The type of a function that tells so many tokens that may follow others, and their logprobs, falling."""


def search(
    likely: Likely, prompt: list[int], params: BeamParams, max_tokens: int, stops: Collection[int]
) -> list[tuple[list[int], float, str]]:
    """The answers of vLLM's beam search: tokens, the sum of their logprobs, and why each ended."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []
    for _ in range(max_tokens):
        found: list[tuple[list[int], float]] = []
        for tokens, total in live:
            for token, value in likely([*prompt, *tokens], 2 * params.width):
                (ended if token in stops else found).append(([*tokens, token], total + value))
        live = sorted(found, key=lambda each: each[1], reverse=True)[: params.width]
        if params.early_stopping and len(ended) >= params.width:
            live = []
        if not live:
            break
    every = [(*each, "stop") for each in ended] + [(*each, "length") for each in live]

    def score(each: tuple[list[int], float, str]) -> float:
        tokens, total, finish = each
        length = len(prompt) + len(tokens) - (finish == "stop")
        return total / length**params.length_penalty

    return sorted(every, key=score, reverse=True)[: params.width]


def told(beams: list[Beam]) -> list[tuple[list[int], float, str]]:
    return [(beam.tokens, beam.total, beam.finish) for beam in beams]
