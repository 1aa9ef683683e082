"""Checkpoints in fp8 have the logits that transformers computes from the numbers they mean."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drive import Driver, load_ranks
from packed_floats import FLOAT_CASES, write_floats
from safetensors.torch import load_file, save_file
from tiny import hf_logits, tiny_checkpoint

from models.checkpoint.weights import WeightsError

PROMPT = [7, 80, 300, 12, 55, 9, 9]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 64, "intermediate_size": 112}
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), **shape)


@pytest.mark.parametrize("name", FLOAT_CASES)
def test_logits_are_those_of_the_plain_checkpoint(name: str, llama: Path, tmp_path: Path) -> None:
    packed, plain = write_floats(llama, tmp_path, name)
    expected = hf_logits(plain, PROMPT).log_softmax(-1)
    for ranks in (1, 2, 4):
        logits = Driver(load_ranks(packed, ranks)).step({0: PROMPT})[0]
        torch.testing.assert_close(logits.log_softmax(-1), expected, atol=1e-4, rtol=0)


def test_numbers_that_are_none_are_refused(llama: Path, tmp_path: Path) -> None:
    packed, _ = write_floats(llama, tmp_path, "rows")
    path, name = packed / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(path)
    tensors[name].view(torch.uint8)[3, 5] = 255
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(
        WeightsError, match=r"model.safetensors: .*up_proj.weight has numbers that are NaN; download"
    ):
        load_ranks(packed)
