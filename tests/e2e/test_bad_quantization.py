"""A quantized checkpoint that cannot be read ends the start: exit code 2, and a last line that says why."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from live import LiveServer
from packed import Recipe, change_config, config_of, write_pair
from safetensors.torch import load_file, save_file
from torch import Tensor

SECONDS = 60
"""A start that is refused takes three seconds; machines that run tests may be busy."""
RECIPE = Recipe(method="gptq", group=32)
DOWN = "model.layers.1.mlp.down_proj"

Break = Callable[[Path], None]


def configured(**fields: object) -> Break:
    return lambda folder: change_config(folder, quantization_config=config_of(RECIPE) | fields)


def tensor(name: str, change: Callable[[Tensor], Tensor | None]) -> Break:
    def run(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        changed = change(tensors.pop(f"{DOWN}.{name}"))
        save_file(
            tensors if changed is None else {**tensors, f"{DOWN}.{name}": changed}, path, {"format": "pt"}
        )

    return run


def in_text_config(folder: Path) -> None:
    change_config(folder, quantization_config=None, text_config={"quantization_config": {"bits": 3}})


BROKEN: dict[str, tuple[Break, tuple[str, ...]]] = {
    "another group": (
        configured(group_size=16),
        ("config.json (gptq, 4 bits, groups of 16)", "take both"),
    ),
    "no zero points": (tensor("qzeros", lambda x: None), (f"{DOWN}.qzeros is missing", "take both from one")),
    "swapped": (
        tensor("qweight", lambda x: x.t().contiguous()),
        (f"{DOWN}.qweight", "has the shape"),
    ),
    "three bits": (configured(bits=3), ("config.json: quantization_config", "'bits' is 3", "use another")),
    "NaN": (
        tensor("scales", lambda x: x * torch.nan),
        ("model.safetensors", f"{DOWN}.scales", "NaN", "download it again, or use another"),
    ),
    "a pattern that explodes": (
        configured(dynamic={"(a+)+$": {}}),
        ("config.json: quantization_config", "'dynamic'", "'(a+)+$' is not used", "name the modules in full"),
    ),
    "in text_config": (in_text_config, ("quantization_config", "'bits' is 3", "use another")),
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 64, "intermediate_size": 96}
    return write_pair(tmp_path_factory.mktemp("pair"), RECIPE, **shape).packed


@pytest.mark.parametrize("name", BROKEN)
def test_it_is_refused_with_one_line(name: str, packed: Path, tmp_path: Path) -> None:
    breaks, told = BROKEN[name]
    folder = shutil.copytree(packed, tmp_path / "model")
    breaks(folder)
    server = LiveServer(str(folder), "--kv-cache-memory-bytes", "16M")
    try:
        assert server.process.wait(SECONDS) == 2
        output = server.output()
    finally:
        server.close()
    # Other processes may still tell how far the start has come.
    [line] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert [text for text in told if text not in line] == [], line
    assert "Traceback" not in output
