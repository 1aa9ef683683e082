"""Replicas that share experts: each has its own tokens, and the results of a model that runs alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import Driver, load_ranks, load_replicas, run_in_chunks, step_together
from mixtures import FAMILIES
from tiny import tiny_checkpoint
from torch import Tensor

from models.config import read_config
from models.layers.moe import MoeMLP
from models.model import CausalLM
from models.parallel.experts import Transport

SIZES = [7, 2, 5, 3]
PROMPTS = [list(range(40, 63)), list(range(7, 12)), [9] * 17, [3, 250, 4]]
TRANSPORTS: list[Transport] = ["allgather_reducescatter", "all_to_all"]
LATENT = {"DeepseekV32ForCausalLM": {"n_routed_experts": 8}}


def run_together(ranks: Sequence[list[CausalLM]], sizes: Sequence[int]) -> list[Tensor]:
    """Each replica reads its prompt in chunks of its own size, and is idle when it has read all."""
    drivers = [Driver(each) for each in ranks]
    chunks = [
        [prompt[start : start + size] for start in range(0, len(prompt), size)]
        for prompt, size in zip(PROMPTS, sizes, strict=False)
    ]
    logits: list[list[Tensor]] = [[] for _ in drivers]
    for number in range(max(map(len, chunks))):
        tokens = [{0: own[number]} if number < len(own) else {} for own in chunks]
        for collected, result in zip(logits, step_together(drivers, tokens), strict=True):
            collected += result.values()
    return [torch.cat(pieces) for pieces in logits]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("replicas", "size"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("family", {**FAMILIES, **LATENT})
def test_replicas_that_share_experts_have_the_results_of_one_model(
    family: str, replicas: int, size: int, transport: Transport, tmp_path: Path
) -> None:
    """Steps of different sizes, and some of the replicas idle in the last ones."""
    folder = tiny_checkpoint(family, tmp_path, **{**FAMILIES, **LATENT}[family])
    ranks = load_replicas(folder, replicas, size, transport=transport)
    found = run_together(ranks, SIZES[:replicas])
    alone = load_ranks(folder)
    for prompt, logits in zip(PROMPTS, found, strict=False):
        expected = run_in_chunks(Driver(alone), 0, prompt, 7)
        torch.testing.assert_close(logits.log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=0)
        assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()


def sent(folder: Path, transport: Transport, replicas: int) -> int:
    """The bytes that the first replica sends for PROMPTS[0] in all layers; the others are idle."""
    ranks: Any = load_replicas(folder, replicas, transport=transport)
    tokens: list[dict[int, list[int]]] = [{0: PROMPTS[0]}, *({} for _ in range(replicas - 1))]
    step_together([Driver(each) for each in ranks], tokens)
    return ranks[0][0].model.layers[0].mlp.experts.parallel.replicas.group._group.sent


@pytest.mark.parametrize("replicas", [2, 4])
def test_what_is_sent_is_counted(replicas: int, tmp_path: Path) -> None:
    """All rows go to all others, whatever they choose; apart, each goes where an expert of it is, at most."""
    folder = tiny_checkpoint("Qwen2MoeForCausalLM", tmp_path, **FAMILIES["Qwen2MoeForCausalLM"])
    raw = read_config(folder).raw
    chosen = raw["num_experts_per_tok"]
    mixtures = sum(isinstance(each, MoeMLP) for each in load_ranks(folder)[0].modules())
    row, choices, tokens = 4 * raw["hidden_size"], 4 * chosen, mixtures * len(PROMPTS[0])
    gathered = sent(folder, "allgather_reducescatter", replicas)
    assert gathered == tokens * (replicas - 1) * (row + 2 * choices)
    apart = sent(folder, "all_to_all", replicas)
    counts = mixtures * 8 * (replicas - 1)
    assert 0 < apart - counts <= tokens * min(chosen, replicas - 1) * (row + choices)
