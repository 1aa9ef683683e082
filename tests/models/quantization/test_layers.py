"""Layers read quantized matrices by pieces, and refuse what does not fit, without reading too much."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drive import Driver, RankGroup, ThreadGroup, assert_logits
from packed import Recipe, change_config, config_of, write_pair
from safetensors.torch import load_file, save_file
from tiny import hf_logits
from torch import Tensor

from models import ops
from models.config import ConfigError, read_config
from models.loader import LoadOptions, load_model
from models.model import ServedModel
from models.parallel.parallel import Parallel
from models.quantization.config import METHODS
from models.weight_slices import WeightsError
from worker.kernels.cpu import operations

RECIPE = Recipe(method="gptq", group=32, symmetric=False, act_order=True)
SHAPE = {"hidden_size": 64, "intermediate_size": 96}
PROMPT = [7, 80, 300, 12, 55]
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"), RECIPE, **SHAPE).packed


@pytest.fixture
def folder(packed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(packed, tmp_path / "model")


def load(folder: Path, load_format: str = "auto", parallel: Parallel = Parallel()) -> ServedModel:
    options = LoadOptions(
        read_config(folder), folder, dtype=torch.float32, load_format=load_format, parallel=parallel
    )
    return load_model(options)


def change(folder: Path, tensors: dict[str, Tensor | None]) -> None:
    path = folder / "model.safetensors"
    changed = {name: tensor for name, tensor in (load_file(path) | tensors).items() if tensor is not None}
    save_file(changed, path, {"format": "pt"})


def changed(name: str, change_it: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        change(folder, {name: change_it(load_file(folder / "model.safetensors")[name])})

    return run


def configured(**fields: object) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        saved = json.loads((folder / "config.json").read_text())["quantization_config"]
        change_config(folder, quantization_config=saved | fields)

    return run


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no zero points": (changed(f"{DOWN}.qzeros", lambda x: None), f"{DOWN}.qzeros is missing"),
    "swapped": (
        changed(f"{DOWN}.qweight", lambda x: x.t().contiguous()),
        rf"{DOWN}.qweight in model.safetensors has the shape \[64, 12\], not \[12, 64\]",
    ),
    "words as numbers": (
        changed(f"{DOWN}.qweight", lambda x: x.float()),
        f"{DOWN}.weight is missing",
    ),
    "another group": (configured(group_size=16), r"qzeros in .* has the shape \[2, 8\], not \[4, 8\]"),
    "other bits": (configured(bits=8), r"qweight in .* has the shape \[.*\], not"),
    "NaN": (
        changed(f"{DOWN}.scales", lambda x: x * torch.nan),
        f"{DOWN}.scales has .* NaN or infinite; download",
    ),
    "a group that is not there": (
        changed(f"{DOWN}.g_idx", lambda x: x + 1),
        rf"model.safetensors: {DOWN}.g_idx names groups from 1 to 3, and there are 3; download",
    ),
    "a bias": (
        lambda folder: change(folder, {f"{DOWN}.bias": torch.ones(64)}),
        f"{DOWN}.bias in .* has no place",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_does_not_fit_is_refused_by_name(name: str, folder: Path) -> None:
    breaks, told = HOSTILE[name]
    breaks(folder)
    with pytest.raises(WeightsError, match=told) as refused:
        load(folder)
    line = str(refused.value)
    assert "model.safetensors" in line
    assert "do not fit" not in line or line.endswith("; take both from one checkpoint")


def test_a_bias_of_zeros_is_let_pass(folder: Path) -> None:
    """GPTQ's own tools save one for every layer."""
    change(folder, {f"{DOWN}.bias": torch.zeros(64)})
    load(folder)


def test_scales_of_inputs_are_let_pass(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ("self_attn.k_scale", "self_attn.v_proj.v_scale", "mlp.up_proj.input_scale")
    change(folder, {f"model.layers.0.{name}": torch.ones(1) for name in names})
    with caplog.at_level("INFO"):
        load(folder)
    assert "1 scales of inputs are used only where inputs of fp8 are rounded, on CUDA" in caplog.text


FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel"}
DUMMIES: dict[str, dict[str, object]] = {
    "fp8 in blocks": {"quant_method": "fp8", "weight_block_size": [48, 48]},
    "fp8": {"quant_method": "fp8"},
    "fp8 in rows": {"quant_method": "fbgemm_fp8"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "floats": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"a": {"targets": ["Linear"], "weights": FLOATS}},
    },
    **{
        str(recipe): config_of(recipe)
        for recipe in (
            RECIPE,
            Recipe(method="gptq", bits=8, group=32, head=True),
            Recipe(method="awq", group=32),
            Recipe(method="auto-round", group=32),
            Recipe(method="pack-quantized", group=32, symmetric=False, act_order=True),
            Recipe(method="int-quantized", bits=8, symmetric=False),
        )
    },
}


@pytest.mark.parametrize("name", DUMMIES)
def test_dummy_weights_are_valid_codes(name: str, folder: Path) -> None:
    """`--load-format dummy` needs the config alone, of whatever method."""
    (folder / "model.safetensors").unlink()
    change_config(folder, quantization_config=DUMMIES[name])
    ops.use(operations.open_kernels(1))
    ranks = [load(folder, "dummy")]
    logits = Driver(ranks).step({0: PROMPT})[0]  # pyright: ignore[reportArgumentType]
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_every_method_has_a_dummy() -> None:
    """A GGUF file has its own, in tests/models/gguf, and so have experts of mxfp4, in test_mxfp4.py."""
    assert {str(saved["quant_method"]) for saved in DUMMIES.values()} == METHODS.keys() - {"gguf", "mxfp4"}


@pytest.mark.parametrize("method", ["gptq", "awq", "auto-round", "pack-quantized", "int-quantized"])
def test_each_rank_reads_its_part_only(method: str, read: list[int], tmp_path: Path) -> None:
    bits = 8 if method == "int-quantized" else 4
    recipe = Recipe(method=method, bits=bits, group=32, head=True)
    folder = write_pair(tmp_path, recipe, hidden_size=64, intermediate_size=128, vocab_size=256).packed
    group = ThreadGroup(2)
    for rank in range(2):
        load(folder, parallel=Parallel(rank, 2, RankGroup(group, rank)))
    unread = {"g_idx", "weight_shape"}
    tensors = load_file(folder / "model.safetensors").items()
    whole = sum(tensor.nbytes for name, tensor in tensors if name.rpartition(".")[2] not in unread)
    assert all(0.5 * whole <= part < 0.52 * whole for part in read)


def test_matrices_of_several_parts(tmp_path: Path) -> None:
    """A checkpoint may hold parts as one matrix, which each rank cuts in several places."""
    recipe = Recipe(method="gptq", group=32, symmetric=False)
    pair = write_pair(tmp_path, recipe, "Phi3ForCausalLM", **SHAPE)
    assert_logits(pair.packed, hf_logits(pair.plain, PROMPT), PROMPT, 1, 2)


def test_models_on_transformers_code_are_refused(folder: Path) -> None:
    options = LoadOptions(read_config(folder), folder, dtype=torch.float32, model_impl="transformers")
    with pytest.raises(ConfigError, match="a checkpoint of gptq needs model code of our own"):
        load_model(options)
