"""Checkpoints in fp8 have the logits that transformers computes from the numbers they mean."""

from pathlib import Path

import pytest
import torch
from drive import assert_logits, load_ranks
from packed import write_both
from packed_floats import FLOAT_CASES, write_floats
from safetensors.torch import load_file, save_file
from tiny import hf_logits, tiny_checkpoint
from torch import Tensor

from models.weight_slices import WeightsError

PROMPT = [7, 80, 300, 12, 55, 9, 9]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 64, "intermediate_size": 112}
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), **shape)


@pytest.mark.parametrize("name", FLOAT_CASES)
def test_logits_are_those_of_the_plain_checkpoint(name: str, llama: Path, tmp_path: Path) -> None:
    packed, plain = write_floats(llama, tmp_path, name)
    assert_logits(packed, hf_logits(plain, PROMPT), PROMPT, 1, 4)


def write_stacks(folder: Path) -> tuple[Path, Path]:
    """Write a tiny Mistral 4 as it is published: a scale for each expert, and one for any other matrix.

    The second is the plain checkpoint that the first means.
    """

    def change(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            scales = tensor.abs().amax((1, 2), keepdim=True) / 440
        elif name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            scales = tensor.abs().max() / 440
        else:
            return None
        scales = scales.bfloat16()
        small = (tensor / scales.float()).to(torch.float8_e4m3fn)
        inputs = f"{name}_" if name.endswith("proj") else name.removesuffix("weight")
        of_inputs = {f"{inputs}activation_scale": 2 * scales.flatten()}
        return {name: small, f"{name}_scale_inv": scales, **of_inputs}, small.float() * scales.float()

    source = tiny_checkpoint("Mistral4ForCausalLM", folder / "of")
    fields = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    return write_both(source, folder, fields | {"modules_to_not_convert": ["lm_head"]}, change)


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    packed, plain = write_stacks(tmp_path)
    assert_logits(packed, hf_logits(plain, PROMPT), PROMPT, 1, 4)


def test_experts_in_one_tensor_with_scales_of_another_shape_are_refused(tmp_path: Path) -> None:
    packed, _ = write_stacks(tmp_path)
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scale_inv"
    tensors[name] = tensors[name].expand(-1, 2, -1).contiguous()
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match=r"_scale_inv in .* has the shape \[8, 2, 1\], not \[8, 1, 1\]"):
        load_ranks(packed)


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
