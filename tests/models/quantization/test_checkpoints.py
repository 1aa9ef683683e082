"""Quantized checkpoints have the logits that transformers computes from the plain matrices they mean."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from drive import Driver, assert_logits, load_ranks, run_in_chunks
from packed import Recipe, write_pair
from packed_floats import write_floats
from tiny import hf_logits, tiny_checkpoint
from tiny_shapes import SHARED_CACHES

from models import ops
from worker.kernels.cpu import operations, torch_operations
from worker.kernels.cpu.quantization import SCHEMES

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
    Recipe(method="pack-quantized", bits=8, plain=("gate_proj",)),
]
"""Formats of compressed-tensors that its own package writes are in test_oracles.py."""


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_logits_are_those_of_the_plain_checkpoint(recipe: Recipe, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, recipe, attention_bias=True, vocab_size=304, **SHAPE)
    assert_logits(pair.packed, hf_logits(pair.plain, PROMPT), PROMPT, 1, 4)


@pytest.mark.parametrize("arch", ["GPTNeoXForCausalLM", "Glm4ForCausalLM", "PhiForCausalLM"])
def test_rows_in_other_orders(arch: str, tmp_path: Path) -> None:
    """Queries, keys and values lie head by head, or in neighbours that are rotated; names are others."""
    pair = write_pair(tmp_path, Recipe(method="gptq", group=32), arch, hidden_size=64, intermediate_size=96)
    assert_logits(pair.packed, hf_logits(pair.plain, PROMPT), PROMPT, 1, 2)


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
    assert_logits(pair.packed, hf_logits(pair.plain, PROMPT), PROMPT, 2)


@pytest.mark.parametrize("method", ["gptq", "awq", "pack-quantized"])
def test_gemma_4(method: str, tmp_path: Path) -> None:
    """Queries, keys and values are one matrix in some layers, and queries alone in others."""
    recipe = Recipe(method=method, group=32, plain=("per_layer_model_projection",))
    shape = {**SHAPE, **SHARED_CACHES, "hidden_size_per_layer_input": 32}
    pair = write_pair(tmp_path, recipe, "Gemma4ForCausalLM", **shape)
    assert_logits(pair.packed, hf_logits(pair.plain, PROMPT), PROMPT, 2)


def test_gemma_3n(tmp_path: Path) -> None:
    """Sparse gates and ups are one matrix, and what makes streams is small."""
    small = ("per_layer_model_projection", "modality_router", "_coefs", "linear_right")
    shape = {**SHAPE, "hidden_size_per_layer_input": 32}
    pair = write_pair(tmp_path, Recipe(method="gptq", group=32, plain=small), "Gemma3nForCausalLM", **shape)
    assert_logits(pair.packed, hf_logits(pair.plain, PROMPT), PROMPT, 1, 2)


# Experts are read matrix by matrix, and routers stay plain.


MIXTURE = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 304}
PLAIN = ("mlp.gate", "block_sparse_moe.gate")

MIXTURES = [
    ("Qwen3MoeForCausalLM", Recipe(method="gptq", group=32, symmetric=False, plain=PLAIN)),
    ("Qwen3MoeForCausalLM", Recipe(method="awq", group=32, symmetric=False, version=2, plain=PLAIN)),
    ("MixtralForCausalLM", Recipe(method="pack-quantized", group=32, plain=PLAIN)),
    ("MixtralForCausalLM", Recipe(method="int-quantized", bits=8, plain=PLAIN)),
]


@pytest.mark.parametrize(("architecture", "recipe"), MIXTURES, ids=str)
def test_experts_are_those_of_the_plain_checkpoint(
    cpu_kernels: None, architecture: str, recipe: Recipe, tmp_path: Path
) -> None:
    own: dict[str, object] = {"intermediate_size": 64, "num_local_experts": 6}
    if architecture.startswith("Qwen"):
        own = {"moe_intermediate_size": 64, "decoder_sparse_step": 1, "num_experts": 6}
    pair = write_pair(tmp_path, recipe, architecture, **MIXTURE, **own)
    expected = hf_logits(pair.plain, PROMPT).log_softmax(-1)
    for ranks, placement in ((2, None), (2, "round_robin")):
        logits = run_in_chunks(Driver(load_ranks(pair.packed, ranks, placement=placement)), 0, PROMPT, 7)
        # Kernels round inputs to 16 bits.
        torch.testing.assert_close(logits.log_softmax(-1), expected, atol=2e-2, rtol=0)


# Weights of 8 bits become int8 or int4 on loading, as those of the plain checkpoint would.


OF_8_BITS = [
    Recipe(method="gptq", bits=8, group=32, symmetric=False, act_order=True, head=True),
    Recipe(method="int-quantized", bits=8, plain=("v_proj",)),
]
SMALL = {"hidden_size": 64, "intermediate_size": 112}


@pytest.mark.parametrize("made", SCHEMES)
@pytest.mark.parametrize("recipe", OF_8_BITS, ids=str)
def test_they_are_as_exact_as_from_the_plain_checkpoint(made: str, recipe: Recipe, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, recipe, **SMALL)
    compare(pair.packed, pair.plain, made)


@pytest.mark.parametrize("made", SCHEMES)
@pytest.mark.parametrize("name", ["DeepSeek's blocks", "rows"])
def test_so_are_those_of_fp8(made: str, name: str, tmp_path: Path) -> None:
    llama = tiny_checkpoint("LlamaForCausalLM", tmp_path / "llama", **SMALL)
    compare(*write_floats(llama, tmp_path, name), made)


def compare(packed: Path, plain: Path, made: str) -> None:
    for table in (operations.open_kernels(1, made), torch_operations.linear_operations(SCHEMES[made])):
        ops.use(table)
        found, expected = (Driver(load_ranks(folder)).step({0: PROMPT})[0] for folder in (packed, plain))
        assert torch.equal(found, expected)
