"""Rounds of requests for one token through a whole engine: what a plain search finds with the logits of
transformers."""

import random
from pathlib import Path

import pytest
import torch
from beam_rule import search, told
from sizes import engine_config
from tiny import hf_logits, tiny_checkpoint

from engine_core.engine import Engine
from engine_core.protocol import AddRequest, Tokens
from server.requests.beam_search import FIRST_ROUND, Beam, BeamParams, BeamRound, BeamRules, advance
from worker.protocol import Sampling, TokenLogprobs

ARCHITECTURES = (
    *("LlamaForCausalLM", "Gemma2ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"),
    *("FalconH1ForCausalLM", "GPT2LMHeadModel"),
)
"""Plain attention, windows in groups of their own, a latent cache, two with states, learned positions."""
STOPS, LONGEST = (2, 7, 30, 31, 32, 33), 10


def searches() -> list[tuple[list[int], BeamParams]]:
    rnd = random.Random(3)
    shared = [rnd.randrange(5, 300) for _ in range(13)]
    prompts = [shared + [rnd.randrange(5, 300) for _ in range(rnd.randint(0, 9))] for _ in range(5)]
    asked = [BeamParams(4), BeamParams(2, 0.0), BeamParams(3, 2.0), BeamParams(1), BeamParams(5)]
    return list(zip(prompts, asked, strict=True))


class Searched:
    """A search through an engine, whose requests have the numbers from 100 * `number` on."""

    def __init__(self, engine: Engine, number: int, prompt: list[int], params: BeamParams) -> None:
        self._engine, self._number, self._prompt = engine, number, prompt
        self._rules = BeamRules(params, frozenset(STOPS), len(prompt), len(prompt) + LONGEST)
        self.round: BeamRound = FIRST_ROUND
        self._landed: dict[int, TokenLogprobs] = {}
        self._send()

    def _send(self) -> None:
        known = len(self._prompt) if self.round is not FIRST_ROUND else 0
        for index, beam in enumerate(self.round.followed):
            tokens, params = [*self._prompt, *beam.tokens], self._rules.sampling(self.round)
            add = AddRequest(id=100 * self._number + index, tokens=tokens, params=params, prompt_len=known)
            self._engine.add(0, add)

    def take(self, answer: Tokens) -> None:
        [self._landed[answer.id % 100]] = answer.logprobs
        if len(self._landed) == len(self.round.followed):
            entries = [self._landed[index] for index in sorted(self._landed)]
            self.round, self._landed = advance(self.round, entries, self._rules), {}
            self._send()


def run(folder: Path, **limits: object) -> tuple[list[list[Beam]], dict[int, list[int]]]:
    """The answers to all searches, and to others that are drawn beside them."""
    fields = {
        "max_model_len": 64,
        "block_size": 4,
        "num_gpu_blocks_override": 160,
        "cpu_threads": 1,
        **limits,
    }
    engine = Engine.start(engine_config(folder, tasks=["generate"], **fields), lambda _: None)
    running: list[Searched] = []
    for number, (prompt, params) in enumerate(searches()):
        running.append(Searched(engine, number, prompt, params))
        add = AddRequest(id=100 * (100 + number), tokens=prompt, params=Sampling(LONGEST, seed=number))
        engine.add(0, add)
    drawn: dict[int, list[int]] = {}
    while engine.busy:
        for answer in engine.step().get(0, []):
            assert isinstance(answer, Tokens), answer
            if (number := answer.id // 100) < 100:
                running[number].take(answer)
            else:
                drawn.setdefault(number, []).extend(answer.tokens)
    engine.stop()
    return [one.round.found for one in running], drawn


@pytest.mark.turns
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_search_finds_what_transformers_logits_say(architecture: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(architecture, tmp_path)

    def likely(tokens: list[int], count: int) -> list[tuple[int, float]]:
        best = torch.log_softmax(hf_logits(folder, tokens)[-1], -1).topk(count)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    found, drawn = run(folder, max_num_seqs=12)
    for id, (prompt, beams) in enumerate(searches()):
        expected = search(likely, prompt, beams, LONGEST, STOPS)
        assert [each[0] for each in told(found[id])] == [each[0] for each in expected]
        for (_, total, finish), (_, wanted, reason) in zip(told(found[id]), expected, strict=True):
            assert (total, finish) == (pytest.approx(wanted, abs=2e-3), reason)
    narrow = run(folder, max_num_seqs=6, num_gpu_blocks_override=60, max_num_batched_tokens=7)
    assert narrow == (found, drawn)  # to the bit
    assert run(folder, max_num_seqs=12, enable_prefix_caching=False) == (found, drawn)
