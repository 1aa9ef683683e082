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
from worker.kernels.cuda.products.inputs import InputForms

heard = []
knobs.compilation.listener = lambda **told: heard.append(told["cache_hit"])
count_compilations()
count_compilations()
driver.set_active(_NoDevice(90))
with collecting() as calls:
    x = torch.empty(4, 64, dtype=torch.bfloat16, device="meta")
    norms.bind(InputForms())["rms_norm"](x, torch.empty(64, dtype=torch.bfloat16, device="meta"), 1e-6)
(call,) = calls
for _ in range(2):
    call.kernel.warmup(*call.arguments, grid=call.grid, **call.options)
    call.kernel.device_caches.clear()
print(compilations(), heard)
"""

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def printed_by(program: str, cache: Path, *given: str) -> str:
    """What a program prints that finds kernels in this cache, and compiles the others."""
    run = subprocess.run(
        [sys.executable, "-c", program, *given],
        cwd=Path(__file__).parents[4],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def test_what_is_compiled_is_counted_and_what_is_found_is_not(tmp_path: Path) -> None:
    printed = printed_by(PROGRAM, tmp_path)
    assert printed.split() == ["1", "[False,", "True]"], "another listener hears of both"


AGAIN = """
import torch
from triton.runtime import driver
from worker.kernels.cuda import norms
from worker.kernels.cuda.compile import _NoDevice
from worker.kernels.cuda.launch import collecting, compilations, count_compilations, launch
from worker.kernels.cuda.products.inputs import InputForms

class Utils:
    def load_binary(self, *_):
        return 1, 2, 32, 0, 1024  # module, function, registers, spills, threads
    def get_device_properties(self, device):
        return {"max_shared_mem": 1 << 18}
class Launcher:
    def __init__(self, source, metadata):
        pass
    def __call__(self, *arguments):
        started.append([each.data_ptr() if hasattr(each, "data_ptr") else each for each in arguments])
class Stub(_NoDevice):
    utils, launcher_cls = Utils(), Launcher

started, bound, run = [], [], norms.norm.run
norms.norm.run = lambda *args, **options: (bound.append(1), run(*args, **options))[1]
count_compilations()
driver.set_active(Stub(90))
rms_norm = norms.bind(InputForms())["rms_norm"]
memory = torch.empty(4096, dtype=torch.bfloat16)
weight = torch.empty(64, dtype=torch.bfloat16)

def start(offset, eps=1e-6, rows=4):
    x = memory[offset:][: rows * 64].view(rows, 64)
    out = rms_norm(x, weight, eps)
    grid, pointers = started[-1][:3], started[-1][9:]
    print(len(bound), compilations(), grid[0] == rows, x.data_ptr() in pointers, out.data_ptr() in pointers)

start(0)
start(0)
with collecting() as calls:
    rms_norm(memory[:256].view(4, 64), weight, 1e-6)
(call,) = calls
call.start()
launch(call.kernel, call.grid, *call.arguments, **call.options)
bare, direct = started[-2:]
print(len(bound), bare[:6] == direct[:6], bare[9:] == direct[9:])
start(64)
start(0, rows=8)
start(0, eps=1e-5)
start(1)
start(1)
start(8)
"""


def test_a_call_like_another_starts_the_same_kernel_without_triton_s_binder(tmp_path: Path) -> None:
    """The lines tell how many calls took the binder, how many kernels are compiled, and what was started."""
    printed = printed_by(AGAIN, tmp_path)
    assert printed.splitlines() == [
        "1 1 True True True",
        "1 1 True True True",
        "2 True True",  # what Triton would start, which was asked once more
        "2 1 True True True",  # other memory
        "2 1 True True True",  # other rows
        "2 1 True True True",  # another number that is no whole one
        "3 2 True True True",  # memory that 16 does not divide has a kernel of its own
        "4 2 True True True",  # which the binder finds each time
        "4 2 True True True",  # and again memory that 16 divides
    ]


NUMBERS = """
import itertools
import sys
import torch
from triton.runtime import driver
from worker.kernels.cuda.compile import _NoDevice
from worker.kernels.cuda.launch import launch
sys.path.insert(0, sys.argv[1])
from probe import probe

class Utils:
    def load_binary(self, *_):
        return 1, next(functions), 32, 0, 1024  # module, function, registers, spills, threads
    def get_device_properties(self, device):
        return {"max_shared_mem": 1 << 18}
class Launcher:
    def __init__(self, source, metadata):
        pass
    def __call__(self, *arguments):
        started.append((arguments[4], arguments[10:]))  # the function, and numbers behind a pointer
class Stub(_NoDevice):
    utils, launcher_cls = Utils(), Launcher

functions, started, bound, run = itertools.count(1), [], [], probe.run
probe.run = lambda *args, **options: (bound.append(1), run(*args, **options))[1]
driver.set_active(Stub(90))
x = torch.empty(16)

def start(number, free, constant=3):
    launch(probe, (1,), x, number, free, number / 2, constant, num_warps=1)

numbers = [7, 9, 16, 1, 48, 1, 0, -5, 2**31 - 1, 2**31, -(2**31), 2**40 + 1, -(2**33), 2**63, 2**63 + 1]
for number, free in itertools.product(numbers, [1, 16, 5, 2**31, 2**63]):
    start(number, free)
    probe.run = run
    probe[(1,)](x, number, free, number / 2, 3, num_warps=1)  # what Triton would start
    probe.run = lambda *args, **options: (bound.append(1), run(*args, **options))[1]
    assert started[-1] == started[-2], (number, free, started[-2:])
print(len(bound), len({function for function, _ in started}))
for length in range(20, 9000):
    start(length, length)
print(len(bound))
start(20, 20, True)
start(20, 20, 4)
print(len(bound))
"""
PROBE = """
import triton
import triton.language as tl

@triton.jit(do_not_specialize=["free"])
def probe(x_ptr, number, free, fraction, CONSTANT: tl.constexpr):
    tl.store(x_ptr, number + free + fraction + CONSTANT)
"""


def test_numbers_choose_the_variant_that_triton_would_choose(tmp_path: Path) -> None:
    """The binder is asked once for each variant, however lengths vary: 7 of one number, 3 of the other."""
    (tmp_path / "probe.py").write_text(PROBE)
    printed = printed_by(NUMBERS, tmp_path / "cache", str(tmp_path))
    assert printed.splitlines() == ["21 21", "21", "23"]


LOADING = """
import os
import sys
from pathlib import Path
import torch
from triton.runtime import driver
from models import ops
from models.config import read_config
from models.conversion.conversion_choice import Conversion
from models.parallel.parallel import Parallel
from worker.config import Place, WorkerConfig
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
dtypes = torch.bfloat16, torch.bfloat16
model = read_config(folder)

def of(rank, ranks):
    place = Place(tensor_rank=rank, tensor_size=ranks, local_rank=rank, local_ranks=ranks)
    served = Conversion(runner="generate", convert="none", architecture=model.architecture)
    return WorkerConfig(folder=str(folder), model=model, conversion=served, place=place)

with device.while_loading(of(0, 1), dtypes, 64, Parallel()):
    pass
print(alone := compilations(), ops.rms_norm is device.kernels["rms_norm"])
for rank in (0, 1):
    with device.while_loading(of(rank, 2), dtypes, 64, Parallel(rank, 2)):
        pass
    print(compilations() - alone)

os.cpu_count = lambda: 1  # one thread, which begins in order
begun = []
class Begun:
    def __init__(self, number):
        self.number = number
    def prepare(self):
        begun.append(self.number)
for rank in range(3):
    with compiling(lambda: [Begun(number) for number in range(7)], None, (rank, 3)):
        pass
print(begun)

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
    alone, of_first, of_both, begun, *loads = run.stdout.splitlines()
    compiled, bound = alone.split()
    assert (int(compiled) >= 8, bound) == (True, "True")
    assert any((tmp_path / "cache").rglob("multiply.cubin")), "also those of quantized matrices"
    assert 0 < int(of_first) <= int(of_both), "two ranks have other variants than one alone"
    assert begun == str([*range(7), 2, 3, 4, 5, 6, 0, 1, 4, 5, 6, 0, 1, 2, 3]), "each begins elsewhere"
    assert loads == ["loads", "loads"]
    assert "when first started: odd config" in run.stderr
    assert "1 of 1 kernels did not compile ahead: odd kernel" in run.stderr
