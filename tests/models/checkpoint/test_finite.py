"""Weights that are not finite are refused where they are brought to a device, too, without waiting for it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from broken import EMBEDDINGS, GATE, NORM, tensor, with_number
from tiny import tiny_checkpoint
from torch import Tensor

from models.checkpoint.damage import FiniteCheck
from models.checkpoint.files import Upload
from models.config import read_config
from models.loader import LoadOptions, load_model
from models.weight_slices import WeightsError

NAN, INFINITE = float("nan"), float("inf")


def upload(read: Tensor, dtype: torch.dtype, report: Callable[[float], None]) -> Tensor:
    report(1.0)
    return read.to(dtype, copy=True)


def load(folder: Path, upload: Upload | None, dtype: torch.dtype) -> None:
    load_model(LoadOptions(read_config(folder), folder, dtype=dtype), upload)


@pytest.mark.parametrize(
    ("broken", "dtype"),
    [
        (with_number(GATE, NAN), torch.bfloat16),
        (with_number(EMBEDDINGS, -INFINITE), torch.float32),
        (with_number(NORM, NAN, torch.bfloat16), torch.float32),
        (with_number(GATE, 1e6), torch.float16),
    ],
    ids=["NaN", "infinite", "NaN in a norm", "too large for float16"],
)
def test_errors_are_those_of_the_host(
    broken: Callable[[Path], object], dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("LlamaForCausalLM", tmp_path)
    broken(folder)
    told: list[str] = []
    for way in (None, upload):
        with pytest.raises(WeightsError) as caught:
            load(folder, way, dtype)
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_finite_numbers_with_an_infinite_sum_are_served(tmp_path: Path) -> None:
    folder = tiny_checkpoint("LlamaForCausalLM", tmp_path)
    tensor(GATE, lambda old: torch.full_like(old, 3e38))(folder)
    load(folder, upload, torch.bfloat16)


def test_what_is_finite_is_not_read_again() -> None:
    check, read = FiniteCheck(at_once=False), list[str]()

    def stored(name: str, value: float) -> Tensor:
        read.append(name)
        return torch.full([3], value)

    for name, value in (("fine", 1.0), ("wrong", NAN), ("worse", NAN)):
        check.add(name, torch.full([3], value), lambda name=name, value=value: stored(name, value))
    assert read == []
    with pytest.raises(WeightsError, match=r"^wrong has 3 of 3 numbers that are NaN"):
        check.finish()
    assert read == ["wrong"]
