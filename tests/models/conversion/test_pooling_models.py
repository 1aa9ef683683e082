"""Models that generate and also pool with one copy of their weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drive import Driver, load_ranks
from pooled import NO, PROMPTS, YES, Params, assert_near, causal_checkpoint, load_pooled, pool

from models.pooling.config import TWO_WAY


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM", "Starcoder2ForCausalLM"])
def test_a_model_that_generates_also_pools(architecture: str, checkpoints: Path) -> None:
    folder = causal_checkpoint(architecture, checkpoints)
    overrides = {"classifier_from_token": [NO, YES], "method": TWO_WAY}
    every = load_pooled(folder, runner="generate", overrides=overrides)
    assert every[0].pooler.tasks == {"embed", "token_embed", "classify", "token_classify"}
    plain = load_ranks(folder)
    assert torch.equal(Driver(every).step({0: PROMPTS[0]})[0], Driver(plain).step({0: PROMPTS[0]})[0])
    assert sum(p.numel() for p in every[0].parameters()) == sum(p.numel() for p in plain[0].parameters())

    params = [Params(), Params("classify"), Params("token_embed"), Params("token_classify")]
    answers = pool(every, [PROMPTS[0]] * 4, params)
    embedder = load_pooled(folder, convert="embed")
    scorer = load_pooled(folder, convert="classify", overrides=overrides)
    alone = [pool(embedder if "embed" in p.task else scorer, [PROMPTS[0]], p)[0] for p in params]
    for answer, expected in zip(answers, alone, strict=True):
        assert_near(answer, expected)


def test_without_labels_it_embeds_only(checkpoints: Path) -> None:
    model = load_pooled(causal_checkpoint("Qwen3ForCausalLM", checkpoints), runner="generate")
    assert model[0].pooler.tasks == {"embed", "token_embed"}
    assert model[0].causal
