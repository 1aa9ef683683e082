"""Checkpoints of 8 bits whose weights become int8 or int4 on loading, as those of the plain one would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drive import Driver, load_ranks
from packed import Recipe, write_pair
from packed_floats import write_floats
from tiny import tiny_checkpoint

from models import ops
from worker.kernels.cpu import operations, torch_operations
from worker.kernels.cpu.quantization import SCHEMES

PROMPT = [7, 80, 300, 12, 55, 9, 9]
RECIPES = [
    Recipe(method="gptq", bits=8, group=32, symmetric=False, act_order=True, head=True),
    Recipe(method="int-quantized", bits=8, plain=("v_proj",)),
]
SHAPE = {"hidden_size": 64, "intermediate_size": 112}


@pytest.mark.parametrize("made", SCHEMES)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_they_are_as_exact_as_from_the_plain_checkpoint(made: str, recipe: Recipe, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, recipe, **SHAPE)
    compare(pair.packed, pair.plain, made)


@pytest.mark.parametrize("made", SCHEMES)
@pytest.mark.parametrize("name", ["DeepSeek's blocks", "rows"])
def test_so_are_those_of_fp8(made: str, name: str, tmp_path: Path) -> None:
    llama = tiny_checkpoint("LlamaForCausalLM", tmp_path / "llama", **SHAPE)
    compare(*write_floats(llama, tmp_path, name), made)


def compare(packed: Path, plain: Path, made: str) -> None:
    for table in (operations.open_kernels(1, made), torch_operations.linear_operations(SCHEMES[made])):
        ops.use(table)
        found, expected = (Driver(load_ranks(folder)).step({0: PROMPT})[0] for folder in (packed, plain))
        assert torch.equal(found, expected)
