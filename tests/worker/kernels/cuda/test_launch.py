"""Kernels that are compiled are counted, and those that Triton's cache has are not."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from uninterpreted import run_uninterpreted

PROGRAM = """
import torch
from triton import knobs
from triton.runtime import driver
from worker.kernels.cuda import norms
from machine_code import NoDevice
from worker.kernels.cuda.launch import collecting, compilations, count_compilations

heard = []
knobs.compilation.listener = lambda **told: heard.append(told["cache_hit"])
count_compilations()
count_compilations()
driver.set_active(NoDevice(90))
with collecting() as calls:
    x = torch.empty(4, 64, dtype=torch.bfloat16, device="meta")
    norms.rms_norm(x, torch.empty(64, dtype=torch.bfloat16, device="meta"), 1e-6)
(call,) = calls
for _ in range(2):
    call.kernel.warmup(*call.arguments, grid=call.grid, **call.options)
    call.kernel.device_caches.clear()
print(compilations(), heard)
"""

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def test_what_is_compiled_is_counted_and_what_is_found_is_not(tmp_path: Path) -> None:
    printed = run_uninterpreted(PROGRAM, TRITON_CACHE_DIR=str(tmp_path)).stdout
    assert printed.split() == ["1", "[False,", "True]"], "another listener hears of both"
