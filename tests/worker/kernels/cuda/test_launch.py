"""Kernels that are compiled are counted, and those that Triton's cache has are not.

The interpreter runs kernels in the process of these tests, so the compiler has one of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from packed import Recipe, write_pair

PROGRAM = """
import torch
from triton import knobs
from triton.runtime import driver
from worker.kernels.cuda import norms
from worker.kernels.cuda.compile import _NoDevice
from worker.kernels.cuda.launch import collecting, compilations, count_compilations

heard = []
knobs.compilation.listener = lambda **told: heard.append(told["cache_hit"])
count_compilations()
count_compilations()
driver.set_active(_NoDevice(90))
with collecting() as calls:
    x = torch.empty(4, 64, dtype=torch.bfloat16, device="meta")
    norms.bind()["rms_norm"](x, torch.empty(64, dtype=torch.bfloat16, device="meta"), 1e-6)
(call,) = calls
for _ in range(2):
    call.kernel.warmup(*call.arguments, grid=call.grid, **call.options)
    call.kernel.device_caches.clear()
print(compilations(), heard)
"""

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def test_what_is_compiled_is_counted_and_what_is_found_is_not(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[4],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == ["1", "[False,", "True]"], "another listener hears of both"


LOADING = """
import sys
from pathlib import Path
import torch
from triton.runtime import driver
from models import ops
from models.config import read_config
from worker.devices.cuda import Cuda
from worker.kernels.cuda import norms
from worker.kernels.cuda.card import Card
from worker.kernels.cuda.compile import _NoDevice, compiling
from worker.kernels.cuda.launch import compilations, count_compilations
from worker.kernels.cuda.table import bind

folder = Path(sys.argv[1])
count_compilations()
driver.set_active(_NoDevice(90))
device = Cuda.__new__(Cuda)
device.target, device._card = torch.device("cpu"), Card(90, 132)
device.kernels = bind(device._card)
with device.while_loading(read_config(folder), folder, (torch.bfloat16, torch.bfloat16), 64):
    pass
print(compilations(), ops.rms_norm is device.kernels["rms_norm"])

def fail():
    raise ValueError("odd config")

with compiling(fail, None):
    print("loads")
class Broken:
    def prepare(self):
        raise ValueError("odd kernel")
with compiling(lambda: [Broken()], None):
    print("loads")
"""


def test_kernels_compile_while_weights_load_and_what_fails_stops_nothing(tmp_path: Path) -> None:
    recipe = Recipe(method="awq", group=32, symmetric=False)
    folder = write_pair(tmp_path, recipe, "Qwen3ForCausalLM", hidden_size=64, intermediate_size=96).packed
    run = subprocess.run(
        [sys.executable, "-c", LOADING, str(folder)],
        cwd=Path(__file__).parents[4],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    compiled, rest = run.stdout.split(maxsplit=1)
    assert int(compiled) >= 8
    assert any((tmp_path / "cache").rglob("multiply.cubin")), "also those of quantized matrices"
    assert rest.split() == ["True", "loads", "loads"]
    assert "when first started: odd config" in run.stderr
    assert "1 of 1 kernels did not compile while weights loaded: odd kernel" in run.stderr
