"""Kernels that an image brings are found where nothing can be written, and no other is compiled into them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from uninterpreted import run_uninterpreted

PROGRAM = """
import sys
from pathlib import Path
import torch
from triton.runtime import driver
from worker.kernels.cuda import norms
from worker.kernels.cuda.compiling import image_cache
from worker.kernels.cuda.compiling.model_variants import _NoDevice
from worker.kernels.cuda.launch import collecting, compilations, count_compilations

image_cache.FOLDER = Path(sys.argv[1])
count_compilations()
driver.set_active(_NoDevice(90))
with collecting() as calls:
    for width in map(int, sys.argv[2:]):
        x = torch.empty(4, width, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(width, dtype=torch.bfloat16, device="meta")
        norms.rms_norm(x, weight, 1e-6)
made = [call.prepare() for call in calls]
print(compilations(), all(each.asm["cubin"] for each in made))
"""
MANAGER = {"TRITON_CACHE_MANAGER": "worker.kernels.cuda.compiling.image_cache:ImageCache"}

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]


def compiled(cache: Path, shipped: Path, *widths: int, **variables: str) -> str:
    """How many kernels were compiled, and whether all have code."""
    own = {"TRITON_CACHE_DIR": str(cache), "TRITON_HOME": str(cache), **variables}
    return run_uninterpreted(PROGRAM, shipped, *widths, **own).stdout.strip()


def test_an_image_s_kernels_are_found_beside_those_of_a_volume(tmp_path: Path) -> None:
    built, image, volume = (tmp_path / name for name in ("built", "image", "volume"))
    assert compiled(built, tmp_path / "none", 64) == "1 True"
    built.rename(image)  # Triton notes where files lay
    before = sorted(image.rglob("*"))
    assert compiled(volume, image, 64) == "1 True", "nothing looks there by itself"
    for path in (tmp_path / "empty", tmp_path / "other"):
        assert compiled(path, image, 64, **MANAGER) == "0 True"
    assert compiled(tmp_path / "empty", image, 64, 4096, **MANAGER) == "1 True", "it has no such kernel"
    assert compiled(tmp_path / "empty", image, 64, 4096, **MANAGER) == "0 True"
    assert sorted(image.rglob("*")) == before
