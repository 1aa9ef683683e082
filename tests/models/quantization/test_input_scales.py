"""The scales that a checkpoint in fp8 has for its inputs: which are read, and which are let pass."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from packed import change_config
from packed_floats import compressed, write_floats
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint

from models import ops
from models.config import read_config
from models.loader import LoadOptions, load_model
from models.ops import reference
from models.ops.grouped_matrix import Grouped, Matrix
from models.weight_slices import WeightsError

STATIC: dict[str, object] = {"quant_method": "fp8", "activation_scheme": "static"}


@pytest.fixture
def read() -> Iterator[list[float | None]]:
    """The scale of inputs of each quantized matrix that is packed, in their order."""
    found: list[float | None] = []

    def pack(*parts: Matrix, **options: Any) -> torch.Tensor:
        found.extend(part.input_scale for part in parts if isinstance(part, Grouped))
        return reference.pack(*parts, **options)

    ops.use({"pack": pack})
    yield found
    ops.use({})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    source = tiny_checkpoint("LlamaForCausalLM", tmp_path / "source", **shape)
    return write_floats(source, tmp_path, "per tensor")[0]


def add_scales(folder: Path, name: str, shape: Sequence[int] = (), first: float = 0.5) -> None:
    """Give each quantized matrix a scale of its own for its inputs."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    modules = [key.removesuffix("weight_scale") for key in tensors if key.endswith("weight_scale")]
    for number, module in enumerate(sorted(modules)):
        tensors[f"{module}{name}"] = torch.full(tuple(shape), number + first)
    save_file(tensors, path, {"format": "pt"})


def load(folder: Path, load_format: str = "auto") -> None:
    options = LoadOptions(
        read_config(folder), folder, dtype=torch.float32, device=torch.device("cpu"), load_format=load_format
    )
    load_model(options)


FLOATS = compressed(strategy="tensor")
GROUP: dict[str, Any] = FLOATS["config_groups"]["group_0"]  # pyright: ignore[reportIndexIssue, reportUnknownVariableType]


def of_inputs(**activations: object) -> dict[str, object]:
    group = GROUP | {"input_activations": {"num_bits": 8, "type": "float"} | activations}
    return FLOATS | {"config_groups": {"group_0": group}}


@pytest.mark.parametrize("name", ["input_scale", "activation_scale"])
@pytest.mark.parametrize(
    "config", [STATIC, of_inputs(dynamic=False, strategy="tensor")], ids=["fp8", "floats"]
)
def test_scales_of_static_inputs_are_read(
    folder: Path, read: list[float | None], config: dict[str, object], name: str
) -> None:
    change_config(folder, quantization_config=config)
    add_scales(folder, name, (1,))
    load(folder)
    by_name = ["down", "gate", "up", "k", "o", "q", "v"]
    assert read == [by_name.index(each) + 0.5 for each in ("q", "k", "v", "o", "gate", "up", "down")]


@pytest.mark.parametrize(
    "config",
    [{"quant_method": "fp8"}, of_inputs(dynamic=True, strategy="token"), of_inputs(num_bits=16), FLOATS],
    ids=["fp8", "dynamic", "16 bits", "weights alone"],
)
def test_other_checkpoints_may_have_scales_that_are_not_read(
    folder: Path, read: list[float | None], config: dict[str, object]
) -> None:
    change_config(folder, quantization_config=config)
    add_scales(folder, "input_scale")
    load(folder)
    assert read == [None] * 7


@pytest.mark.parametrize("shape", [None, (3,)])
def test_static_inputs_without_one_scale_are_rounded_by_their_own(
    folder: Path, read: list[float | None], shape: tuple[int, ...] | None
) -> None:
    change_config(folder, quantization_config=STATIC)
    if shape is not None:
        add_scales(folder, "input_scale", shape)
    load(folder)
    assert read == [None] * 7


def test_dummy_weights_have_scales_where_the_config_says_so(folder: Path, read: list[float | None]) -> None:
    change_config(folder, quantization_config=STATIC)
    load(folder, "dummy")
    assert read == [1.0] * 8, "the head is in the config, too"


def test_a_scale_that_is_not_above_0_is_refused(folder: Path) -> None:
    change_config(folder, quantization_config=STATIC)
    add_scales(folder, "input_scale", first=0.0)
    with pytest.raises(WeightsError, match="input_scale is 0, but a scale must be above 0"):
        load(folder)


def test_the_log_says_where_scales_of_inputs_are_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_config(folder, quantization_config=STATIC)
    add_scales(folder, "input_scale")
    with caplog.at_level("INFO"):
        load(folder)
    assert "7 scales of inputs are used only where inputs of fp8 are rounded, on CUDA" in caplog.text
