"""The digest of weights sees other files, names, types and values, and reads next to nothing."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.fingerprint import digest_weights
from models.weight_slices import WeightsError


def write(folder: Path, tensors: dict[str, Tensor], load_format: str = "auto") -> str:
    folder.mkdir(exist_ok=True)
    if load_format == "pt":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return digest_weights(folder, load_format, seed=0)


def tensors() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    return {f"layers.{i}.weight": torch.randn(40, 30, generator=made) for i in range(4)} | {
        "b": torch.ones(3)
    }


@pytest.mark.parametrize("load_format", ["auto", "pt"])
def test_it_changes_with_the_weights(tmp_path: Path, load_format: str) -> None:
    def digest(folder: str, **changed: Tensor) -> str:
        return write(tmp_path / folder, tensors() | changed, load_format)

    first = digest("a")
    others = [
        digest("b", **{"layers.2.weight": torch.randn(40, 30)}),
        digest("c", b=torch.tensor([1.0, 1.0, 2.0])),
        digest("d", b=torch.ones(3).bfloat16()),
        digest("e", b=torch.ones(1, 3)),
        digest("f", added=torch.ones(1)),
        write(tmp_path / "g", {f"x{name}": tensor for name, tensor in tensors().items()}, load_format),
    ]
    assert digest("h") == first
    assert len({first, *others}) == 1 + len(others)


def test_any_row_of_samples_counts(tmp_path: Path) -> None:
    """The first and the last elements, and those a third and two thirds of the way."""
    first = write(tmp_path, {"w": torch.zeros(3000)})
    for place in (0, 15, 1000, 2000, 2999):
        changed = torch.zeros(3000)
        changed[place] = 1
        assert write(tmp_path, {"w": changed}) != first, place


def test_dummy_weights_are_their_seed(tmp_path: Path) -> None:
    seeds = (0, 1, 0)
    first, other, again = (digest_weights(tmp_path, "dummy", seed) for seed in seeds)
    assert first == again != other


def test_damaged_files_are_left_to_loading(tmp_path: Path) -> None:
    for content in (b"", b"\xff" * 20, (5).to_bytes(8, "little") + b"[1,2]"):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert digest_weights(tmp_path, "auto", 0)
    with pytest.raises(WeightsError):
        digest_weights(tmp_path / "nowhere", "auto", 0)


def test_large_tensors_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread, count = os.pread, 0

    def counted(file: int, size: int, place: int) -> bytes:
        nonlocal count
        count += size
        return pread(file, size, place)

    monkeypatch.setattr(os, "pread", counted)
    write(tmp_path, {f"w{i}": torch.zeros(100_000) for i in range(3)})
    assert 3 * 4 * 64 <= count < 2000
