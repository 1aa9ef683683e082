"""Checkpoints of bitsandbytes and of ModelOpt have the logits of the plain checkpoints that they mean."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from drive import assert_logits, load_ranks
from packed import Change, write_both
from safetensors.torch import load_file, save_file
from tiny import hf_logits, tiny_checkpoint
from torch import Tensor

from models.checkpoint.files import open_source
from models.checkpoint.weights import Reading, Weights
from models.config import ConfigError, read_config
from models.ops.grouped_matrix import Grouped, widen
from models.quantization.config import check_quantization, read_quantization
from models.quantization.matrices import read_matrix
from models.weight_slices import Cut, WeightsError

PROMPT = [7, 80, 300, 12, 55, 9, 9]
NF4 = (
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
)
FP4 = (0.0, 0.005208333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25)
TABLES = {"nf4": NF4, "fp4": (*FP4, *(-level for level in FP4))}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DAMAGED = ("absmax", "quant_map", "quant_state.bitsandbytes__nf4")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 64, "intermediate_size": 112}
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), **shape)


def in_blocks(kind: str, block: int, *, nested: bool) -> Change:
    """Store matrices as bitsandbytes does: all rows in a line, in blocks that need not end with a row."""
    table = torch.tensor(TABLES[kind])

    def change(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not name.endswith("_proj.weight"):
            return None
        line = tensor.float().flatten()
        line = torch.cat([line, line.new_zeros(-len(line) % block)]).view(-1, block)
        largest = line.abs().amax(1)
        state: dict[str, object] = {"quant_type": kind, "blocksize": block, "shape": list(tensor.shape)}
        beside = {"absmax": largest, "quant_map": table.clone()}
        if nested:
            offset, map_of_scales = largest.mean().item(), torch.linspace(-1, 1, 256)
            outer = (largest - offset).abs().split(8)
            factors = torch.stack([each.max() for each in outer])
            relative = (largest - offset) / factors.repeat_interleave(8)[: len(largest)]
            codes = (relative.unsqueeze(1) - map_of_scales).abs().argmin(1)
            largest = map_of_scales[codes] * factors.repeat_interleave(8)[: len(largest)] + offset
            state |= {"nested_blocksize": 8, "nested_offset": offset, "nested_dtype": "float32"}
            beside |= {"absmax": codes.to(torch.uint8), "nested_absmax": factors}
            beside["nested_quant_map"] = map_of_scales.clone()
        chosen = (line / largest.unsqueeze(1)).unsqueeze(-1).sub(table).abs().argmin(-1)
        plain = (table[chosen] * largest.unsqueeze(1)).flatten()[: tensor.numel()].view(tensor.shape)
        codes = chosen.flatten()[: tensor.numel()].to(torch.uint8).view(-1, 2)
        said = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        beside[f"quant_state.bitsandbytes__{kind}"] = said
        stored = {f"{name}.{part}": each for part, each in beside.items()}
        return {name: (codes[:, :1] << 4) | codes[:, 1:], **stored}, plain

    return change


def in_bytes(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    if not name.endswith("_proj.weight"):
        return None
    scales = tensor.abs().amax(1)
    codes = (tensor * 127 / scales.unsqueeze(1)).round().to(torch.int8)
    module = name.removesuffix("weight")
    beside = {f"{module}SCB": scales, f"{module}weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {name: codes, **beside}, codes.float() * scales.unsqueeze(1) / 127


def in_nvfp4(*, divided: bool) -> Change:
    """Two codes of e2m1 a byte, scales of e4m3 for 16 inputs, and one for all, by which some divide."""
    table = torch.tensor([*E2M1, *(-level for level in E2M1)])

    def change(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not name.endswith("_proj.weight"):
            return None
        groups = tensor.view(len(tensor), -1, 16)
        whole = groups.abs().max() / (6 * 448)
        scales = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        factor = (scales.float() * whole).unsqueeze(-1)
        chosen = (groups / factor.clamp_min(1e-9)).unsqueeze(-1).sub(table).abs().argmin(-1).to(torch.uint8)
        plain = (table[chosen.int()] * factor).view(tensor.shape)
        codes = chosen.view(len(tensor), -1, 2)
        packed, module = codes[..., 0] | (codes[..., 1] << 4), name.removesuffix("weight")
        if divided:
            stored = {f"{module}weight_packed": packed, f"{module}weight_global_scale": 1 / whole.reshape(1)}
            stored[f"{module}input_global_scale"] = torch.ones(1)
        else:
            stored = {name: packed, f"{module}weight_scale_2": whole, f"{module}input_scale": whole.clone()}
        return {f"{module}weight_scale": scales, **stored}, plain

    return change


def in_e4m3(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    if not name.endswith("_proj.weight"):
        return None
    scale, module = tensor.abs().max() / 448, name.removesuffix("weight")
    codes = (tensor / scale).to(torch.float8_e4m3fn)
    beside = {f"{module}weight_scale": scale, f"{module}input_scale": scale.clone()}
    if name.endswith("k_proj.weight"):
        beside[f"{module}k_scale"] = scale.clone()
    return {name: codes, **beside}, codes.float() * scale


def fields(method: str, **others: object) -> dict[str, object]:
    return {"quant_method": method, **others}


FOUR = fields("bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["lm_head"])
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
CASES: Mapping[str, tuple[dict[str, object], Callable[..., object]]] = {
    "nf4": (FOUR, in_blocks("nf4", 64, nested=False)),
    "nf4 with scales of scales": (FOUR, in_blocks("nf4", 64, nested=True)),
    "blocks across rows": (FOUR, in_blocks("nf4", 48, nested=True)),
    "fp4": (FOUR | {"bnb_4bit_quant_type": "fp4"}, in_blocks("fp4", 64, nested=False)),
    "int8": (fields("bitsandbytes", load_in_8bit=True), in_bytes),
    "ModelOpt's fp8": (fields("modelopt", quant_algo="FP8", ignore=["lm_head"]), in_e4m3),
    "ModelOpt's nvfp4": (fields("modelopt", quant_algo="NVFP4", ignore=["lm_head"]), in_nvfp4(divided=False)),
    "nvfp4 of compressed-tensors": (
        fields(
            "compressed-tensors",
            format="nvfp4-pack-quantized",
            ignore=["lm_head"],
            config_groups={"group_0": GROUP},
        ),
        in_nvfp4(divided=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_plain_checkpoint(name: str, llama: Path, tmp_path: Path) -> None:
    config, change = CASES[name]
    packed, plain = write_both(llama, tmp_path, config, change)  # pyright: ignore[reportArgumentType]
    assert_logits(packed, hf_logits(plain, PROMPT), PROMPT, 1, 4)


@pytest.mark.parametrize(
    ("name", "stays"), [("nf4 with scales of scales", True), ("blocks across rows", False)]
)
def test_matrices_stay_4_bits_where_blocks_end_with_rows(
    name: str, stays: bool, llama: Path, tmp_path: Path
) -> None:
    packed, plain = write_both(llama, tmp_path, *CASES[name])  # pyright: ignore[reportArgumentType]
    config = read_config(packed)
    quantization = read_quantization(config)
    reading = Reading(
        open_source(packed, "auto"),
        device=torch.device("cpu"),
        dtype=torch.float32,
        quantization=quantization,
    )
    scope = Weights(reading).at("model.layers.0.mlp.up_proj")
    for cut in (None, Cut(0, 28, 56), Cut(1, 16, 32)):
        matrix = read_matrix(scope, (112, 64), cut)
        assert isinstance(matrix, Grouped) == stays
        expected = load_file(plain / "model.safetensors")[f"{scope.path}.weight"]
        torch.testing.assert_close(widen(matrix), expected if cut is None else cut.of(expected))


@pytest.mark.parametrize("damaged", DAMAGED)
def test_matrices_of_4_bits_without_their_numbers_are_refused(
    damaged: str, llama: Path, tmp_path: Path
) -> None:
    packed, _ = write_both(llama, tmp_path, *CASES["nf4"])  # pyright: ignore[reportArgumentType]
    path, name = packed / "model.safetensors", f"model.layers.0.mlp.up_proj.weight.{damaged}"
    tensors = load_file(path)
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"up_proj.weight has .*quant_state.*; download it again"):
        load_ranks(packed)
    del tensors[name]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"up_proj.weight has .*quant_state.*; download it again"):
        load_ranks(packed)


REFUSED = {
    "neither": (fields("bitsandbytes"), "one of 'load_in_4bit' and 'load_in_8bit' must be true"),
    "storage": (FOUR | {"bnb_4bit_quant_storage": "bfloat16"}, "must be uint8"),
    "another algorithm": (fields("modelopt", quant_algo="W4A8_AWQ"), "must be FP8 or NVFP4"),
    "torchao": (fields("torchao", quant_type={}), "torchao's tensors are pickled objects"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_with_the_way_out(name: str, llama: Path, tmp_path: Path) -> None:
    given, said = REFUSED[name]
    packed, _ = write_both(llama, tmp_path, given, lambda name, tensor: None)
    with pytest.raises(ConfigError, match=said):
        read_quantization(read_config(packed))


def test_names_of_methods_check_the_checkpoint(llama: Path, tmp_path: Path) -> None:
    packed, _ = write_both(llama, tmp_path, *CASES["ModelOpt's nvfp4"])  # pyright: ignore[reportArgumentType]
    config = read_config(packed)
    check_quantization(config, "modelopt_fp4")
    found = read_quantization(config)
    assert found is not None and found.describe() == "modelopt, NVFP4"
    with pytest.raises(ConfigError, match="the checkpoint is of modelopt"):
        check_quantization(config, "bitsandbytes")
    with pytest.raises(ConfigError, match="not quantized; leave the option out, or choose int8"):
        check_quantization(read_config(llama), "bitsandbytes")
