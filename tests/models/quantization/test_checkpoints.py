"""Quantized checkpoints have the logits that transformers computes from the plain matrices they mean."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from drive import assert_logits
from packed import Recipe, write_pair
from tiny import hf_logits
from tiny_shapes import SHARED_CACHES

PROMPT = random.Random(1).choices(range(5, 300), k=23)

SHAPE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4}
"""Sizes with several groups of 32 in a matrix, and pieces of ranks that end within groups."""

RECIPES = [
    Recipe(method="gptq", group=32),
    Recipe(method="gptq", group=32, symmetric=False),
    Recipe(method="gptq", group=32, symmetric=False, version=2, act_order=True),
    Recipe(method="gptq", group=64, act_order=True, head=True),
    Recipe(method="gptq", group=128, symmetric=False, version=2),
    Recipe(method="gptq", bits=8, symmetric=False, version=2),
    Recipe(method="gptq", bits=8, group=32, other={"down_proj": 4, "k_proj": 4}, plain=("v_proj",)),
    Recipe(method="awq", group=32, symmetric=False, version=2, head=True),
    Recipe(method="awq", version=2, plain=("k_proj",)),
    Recipe(method="auto-round", group=64, other={"up_proj": 8}, plain=("o_proj",)),
    Recipe(method="pack-quantized", group=32, scales=torch.bfloat16),
    Recipe(method="pack-quantized", group=128, symmetric=False, head=True),
    Recipe(method="pack-quantized", group=32, symmetric=False, act_order=True),
    Recipe(method="pack-quantized", bits=8, plain=("gate_proj",)),
    Recipe(method="int-quantized", bits=8, scales=torch.float32),
    Recipe(method="int-quantized", bits=8, symmetric=False, channels=False, version=2),
]


@pytest.mark.turns(5)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_logits_are_those_of_the_plain_checkpoint(recipe: Recipe, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, recipe, attention_bias=True, vocab_size=304, **SHAPE)
    assert_logits(pair.packed, hf_logits(pair.plain, PROMPT), PROMPT, 1, 2, 4)


@pytest.mark.turns
@pytest.mark.parametrize("arch", ["GPTNeoXForCausalLM", "Glm4ForCausalLM", "PhiForCausalLM"])
def test_rows_in_other_orders(arch: str, tmp_path: Path) -> None:
    """Queries, keys and values lie head by head, or in neighbours that are rotated; names are others."""
    pair = write_pair(tmp_path, Recipe(method="gptq", group=32), arch, hidden_size=64, intermediate_size=96)
    assert_logits(pair.packed, hf_logits(pair.plain, PROMPT), PROMPT, 1, 2)


@pytest.mark.turns
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(method="gptq", group=32, plain=("in_proj_a", "in_proj_b")),
        Recipe(method="awq", version=2, symmetric=False, group=32),
        Recipe(method="int-quantized", bits=8, scales=torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", ["Qwen3_5ForCausalLM", "Qwen3NextForCausalLM"])
def test_hybrids(arch: str, recipe: Recipe, tmp_path: Path) -> None:
    """Their projections are several parts of one matrix, or brought into another order."""
    shape = {**SHAPE, "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_value_head_dim": 16}
    pair = write_pair(tmp_path, recipe, arch, mlp_only_layers=[0, 1, 2, 3], **shape)
    assert_logits(pair.packed, hf_logits(pair.plain, PROMPT), PROMPT, 1, 2)


@pytest.mark.parametrize("method", ["gptq", "awq", "pack-quantized"])
def test_gemma_4(method: str, tmp_path: Path) -> None:
    """Queries, keys and values are one matrix in some layers, and queries alone in others."""
    recipe = Recipe(method=method, group=32, plain=("per_layer_model_projection",))
    shape = {**SHAPE, **SHARED_CACHES, "hidden_size_per_layer_input": 32}
    pair = write_pair(tmp_path, recipe, "Gemma4ForCausalLM", **shape)
    assert_logits(pair.packed, hf_logits(pair.plain, PROMPT), PROMPT, 1, 2)
