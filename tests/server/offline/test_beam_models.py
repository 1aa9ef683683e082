"""Beam search through a whole engine: what a plain search finds with the logits of transformers."""

import random
from pathlib import Path

import pytest
import torch
from fake_beams import search, told
from sizes import engine_config
from tiny import hf_logits, tiny_checkpoint

from engine_core.beams.beam_params import Beam, BeamParams
from engine_core.engine import Engine
from engine_core.protocol import Add, Failed, Tokens
from worker.protocol import Sampling

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
    asked = [BeamParams(4, 4), BeamParams(2, 2, 0.0), BeamParams(3, 1, 2.0), BeamParams(1), BeamParams(5, 5)]
    return list(zip(prompts, asked, strict=True))


def run(folder: Path, **limits: object) -> tuple[dict[int, list[Beam]], dict[int, list[int]]]:
    """The answers to all searches, and to others that are drawn beside them."""
    fields = {
        "max_model_len": 64,
        "block_size": 4,
        "num_gpu_blocks_override": 160,
        "cpu_threads": 1,
        **limits,
    }
    engine = Engine.start(engine_config(folder, tasks=["generate"], **fields), lambda _: None)
    for id, (prompt, beams) in enumerate(searches()):
        params = Sampling(LONGEST, temperature=0.0, stop_token_ids=STOPS, logprobs=beams.candidates)
        engine.add(0, Add(id=id, tokens=prompt, params=params, beams=beams))
        engine.add(0, Add(id=100 + id, tokens=prompt, params=Sampling(LONGEST, seed=id)))
    found: dict[int, list[Beam]] = {}
    drawn: dict[int, list[int]] = {}
    while engine.busy:
        for answer in engine.step().get(0, []):
            assert not isinstance(answer, Failed), answer
            if isinstance(answer, Tokens) and answer.id < 100:
                found[answer.id] = answer.beams
            elif isinstance(answer, Tokens):
                drawn.setdefault(answer.id, []).extend(answer.tokens)
    engine.stop()
    return found, drawn


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
