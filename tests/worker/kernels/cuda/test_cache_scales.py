"""A checkpoint's scales for a KV cache of 8 bits: under all their names, and in the tokens of a worker."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import Driver, load_ranks
from interpreted import DEVICE  # before any kernel is imported
from packed import change_config
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint
from torch import Tensor

from models import ops
from models.layers.attention import Attention
from models.model import CausalLM
from models.ops.attention_inputs import CacheScales
from models.weight_slices import WeightsError
from worker.cache.kv_cache_size import describe_small_cache
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.operations import cuda_operations

E4M3 = torch.float8_e4m3fn
PROMPT = [7, 80, 300, 12, 55, 9, 9, 41, 17]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("Qwen3ForCausalLM", tmp_path_factory.mktemp("plain"))


def with_scales(source: Path, folder: Path, **scales: Tensor) -> Path:
    """A copy whose layers all have these tensors beside their projections."""
    copy = shutil.copytree(source, folder / "scaled")
    tensors = load_file(copy / "model.safetensors")
    layers = {name.split(".self_attn.")[0] for name in tensors if ".self_attn." in name}
    for layer in layers:
        tensors |= {f"{layer}.self_attn.{name}": scale.clone() for name, scale in scales.items()}
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    scheme: dict[str, object] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    fields = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    change_config(copy, quantization_config=fields)
    return copy


def scales_of(model: CausalLM) -> list[CacheScales | None]:
    return [layer.cache_scales for layer in model.attention_layers() if isinstance(layer, Attention)]


def number(scale: float, *shape: int) -> Tensor:
    return torch.full(shape, scale)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"k_scale": number(0.5, 1), "v_scale": number(0.25, 1)}, (0.5, 0.25)),
        ({"attn.k_scale": number(0.5), "attn.v_scale": number(0.25).bfloat16()}, (0.5, 0.25)),
        ({"k_proj.output_scale": number(0.5, 1), "v_proj.output_scale": number(2.0, 1)}, (0.5, 2)),
        ({"k_proj.k_scale": number(0.5, 1), "v_proj.v_scale": number(2.0, 1)}, (0.5, 2)),
        ({"kv_scale": number(0.5, 1)}, (0.5, 0.5)),
        ({"k_scale": number(0.5, 1)}, (0.5, 0.5)),
        ({"q_scale": number(0.5, 1)}, None),
        ({"k_scale": number(0.5, 2, 1, 1), "v_scale": number(0.5, 2, 1, 1)}, None),
    ],
)
def test_scales_are_found_by_all_their_names(
    given: dict[str, Tensor], expected: tuple[float, float] | None, plain: Path, tmp_path: Path
) -> None:
    models = load_ranks(with_scales(plain, tmp_path, **given), 2)
    wanted = None if expected is None else CacheScales(*expected)
    assert all(scales == [wanted] * len(scales) for scales in map(scales_of, models))


@pytest.mark.parametrize("wrong", [0.0, -1.0])
def test_a_scale_that_is_none_is_refused(wrong: float, plain: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"self_attn\.k_scale.? is (0|-1), but a scale must be above 0"):
        load_ranks(with_scales(plain, tmp_path, k_scale=number(wrong, 1)))


def computed(folder: Path, cached: torch.dtype, operations: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """The logits after a prompt in two pieces and a token by itself, and what layers have cached."""
    ops.use(operations)
    try:
        models = load_ranks(folder, device=DEVICE.type)
        driver = Driver(models, dtype=cached, device=DEVICE.type)
        pieces = [driver.step({0: piece})[0] for piece in (PROMPT[:5], PROMPT[5:], [3])]
        return torch.cat(pieces).cpu(), [layer.bound() for layer in models[0].attention_layers()]
    finally:
        ops.use({})


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def test_a_cache_of_8_bits_has_the_numbers_of_its_scales(plain: Path, tmp_path: Path) -> None:
    """The values are too large for e4m3, which loses them unless they are divided by a scale."""
    source = shutil.copytree(plain, tmp_path / "large")
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("v_proj.weight"):
            tensor *= 3e4
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    exact, cache = computed(source, torch.float32, {})
    keys, values = (
        max(layer[part].nan_to_num().abs().max().item() for layer in cache) / 448 for part in (0, 1)
    )
    assert values > 2
    folder = with_scales(source, tmp_path, k_scale=number(keys, 1), v_scale=number(values, 1))
    kernels = cuda_operations(Card(90, 4))
    assert error(computed(source, E4M3, {})[0], exact) > 0.2
    for operations in ({}, kernels):
        assert error(computed(folder, E4M3, operations)[0], exact) < 0.05
    assert torch.equal(computed(folder, torch.float32, {})[0], exact), "a cache of 32 bits is not scaled"


def test_what_a_cache_has_is_told(plain: Path, tmp_path: Path) -> None:
    scaled = load_ranks(with_scales(plain, tmp_path, k_scale=number(0.5, 1)))[0].attention_layers()
    unscaled = load_ranks(plain)[0].attention_layers()
    count = len(scaled)
    assert describe_small_cache(unscaled, torch.bfloat16) is None
    assert describe_small_cache(scaled, E4M3) == (
        f"the KV cache is in float8_e4m3fn, by the checkpoint's scales in {count} of {count} layers"
    )
    assert "has no scales for it, so 1 is taken" in str(describe_small_cache(unscaled, E4M3))
    assert "scales for fp8 are not used" in str(describe_small_cache(scaled, torch.bfloat16))
