"""Experts of quantized checkpoints are read matrix by matrix, and routers stay plain."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from drive import Driver, load_ranks, run_in_chunks
from packed import Recipe, write_pair
from tiny import hf_logits

PROMPT = random.Random(1).choices(range(5, 300), k=17)

SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 304}
PLAIN = ("mlp.gate", "block_sparse_moe.gate")

CASES = [
    ("Qwen3MoeForCausalLM", Recipe(method="gptq", group=32, symmetric=False, plain=PLAIN)),
    ("Qwen3MoeForCausalLM", Recipe(method="awq", group=32, symmetric=False, version=2, plain=PLAIN)),
    ("MixtralForCausalLM", Recipe(method="pack-quantized", group=32, plain=PLAIN)),
    ("MixtralForCausalLM", Recipe(method="int-quantized", bits=8, plain=PLAIN)),
]


@pytest.mark.turns(4)
@pytest.mark.parametrize(("architecture", "recipe"), CASES, ids=str)
def test_experts_are_those_of_the_plain_checkpoint(
    cpu_kernels: None, architecture: str, recipe: Recipe, tmp_path: Path
) -> None:
    own: dict[str, object] = {"intermediate_size": 64, "num_local_experts": 6}
    if architecture.startswith("Qwen"):
        own = {"moe_intermediate_size": 64, "decoder_sparse_step": 1, "num_experts": 6}
    pair = write_pair(tmp_path, recipe, architecture, **SHAPE, **own)
    expected = hf_logits(pair.plain, PROMPT).log_softmax(-1)
    for ranks, placement in ((1, None), (2, None), (2, "round_robin")):
        logits = run_in_chunks(Driver(load_ranks(pair.packed, ranks, placement=placement)), 0, PROMPT, 7)
        # Kernels round inputs to 16 bits.
        torch.testing.assert_close(logits.log_softmax(-1), expected, atol=2e-2, rtol=0)
