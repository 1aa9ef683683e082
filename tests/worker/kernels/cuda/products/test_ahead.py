"""Matrices of a model that is only asked for its kernels have the forms that they have when it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from interpreted import DEVICE  # before any kernel is imported
from packed import Recipe, write_pair

from models import ops
from models.config import read_config
from models.loader import LoadOptions, load_model
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.operations import cuda_operations
from worker.kernels.cuda.products.packing import Packed

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def _operations() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    ops.use(cuda_operations(Card(90, 132)))
    yield
    ops.use({})


def forms(folder: Path, load_format: str, device: torch.device) -> list[object]:
    """All that variants of kernels depend on, of each quantized matrix."""
    config = read_config(folder)
    options = LoadOptions(config, folder, dtype=torch.bfloat16, device=device, load_format=load_format)
    return [
        (matrix.form, matrix.outputs, matrix.inputs, [None if x is None else x.dtype for x in matrix.parts])
        for matrix in load_model(options).parameters()
        if isinstance(matrix, Packed)
    ]


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(method="gptq", group=32),
        Recipe(method="gptq", group=32, symmetric=False, bits=8),
        Recipe(method="awq", group=32, symmetric=False),
        Recipe(method="pack-quantized", group=32, scales=torch.bfloat16),
        Recipe(method="int-quantized", bits=8, scales=torch.float32),
    ],
    ids=str,
)
def test_forms_are_known_before_weights_are_read(recipe: Recipe, tmp_path: Path) -> None:
    folder = write_pair(tmp_path, recipe, **SHAPE).packed
    loaded = forms(folder, "auto", DEVICE)
    assert len(loaded) == 4
    assert forms(folder, "dummy", torch.device("meta")) == loaded
