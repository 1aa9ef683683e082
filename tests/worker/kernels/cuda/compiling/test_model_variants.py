"""The list of a model's kernels is that of each rank, stage and replica which serves it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from packed import Recipe, write_pair
from tiny import tiny_checkpoint
from uninterpreted import run_uninterpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


RANKS = """
import sys
from functools import partial
from pathlib import Path
import torch
from models.config import read_config
from machine_code import calls_of_ranks
from worker.kernels.cuda.compiling.model_variants import describe, model_calls

folder = Path(sys.argv[1])
model = partial(model_calls, read_config(folder), folder, torch.bfloat16, 90)

JOINED = {"project_heads", "project_gates", "add_product"}  # which one rank alone has

def names(calls):
    return {call.kernel.fn.__name__ for call in calls}
"""
HEADS = """
from worker.kernels.cuda.attention_kernel import Form

for ranks in (1, 2, 4):
    given = [each for call in calls_of_ranks(model, ranks) for each in call.arguments]
    print(sorted({(each.heads, each.group) for each in given if isinstance(each, Form)}))
"""
STAGES = """
from models.parallel.parallel import Parallel

whole = names(model())
first, last = (names(model(parallel=Parallel(stage=stage, stages=2))) for stage in range(2))
print("draw_row" in first, "draw_row" in last, "attend" in first & last, first | last == whole)
print(names(calls_of_ranks(model, 2, stages=2)) == whole - JOINED)
"""
EXPERTS = """
from torch import Tensor

def inner_widths(calls):  # the least widths of what experts multiply
    return [min(x.shape[-1] for x in call.arguments if isinstance(x, Tensor) and x.ndim > 1)
            for call in calls if call.kernel.fn.__name__ == "multiply_pairs"]

whole, cut, shared = (calls_of_ranks(model, ranks, whole_experts=apart)
                      for ranks, apart in ((1, False), (2, False), (2, True)))
print(names(whole) - JOINED == names(cut) == names(shared))
print(min(inner_widths(cut)) * 2 == min(inner_widths(shared)) == min(inner_widths(whole)))
print(len(calls_of_ranks(model, 1, whole_experts=True)) == len(whole))

def of_experts(ranks, **given):  # what is started for experts
    calls = calls_of_ranks(model, ranks, whole_experts=True, **given)
    kernels = ("sort_pairs", "multiply_pairs", "add_pairs")
    return {describe(call) for call in calls if call.kernel.fn.__name__ in kernels}

replicas = of_experts(1, replicas=4)  # their tokens are never one alone, whose pairs are not sorted
print(replicas == of_experts(2, replicas=2) < of_experts(4) != of_experts(1))
one_by_one = of_experts(1, replicas=4, transport="all_to_all")
print(one_by_one == of_experts(4, transport="all_to_all") != of_experts(4))
"""


def of_ranks(folder: Path, program: str) -> list[str]:
    return run_uninterpreted(RANKS + program, folder).stdout.splitlines()


def test_ranks_have_the_variants_of_their_heads(tmp_path: Path) -> None:
    """Four heads share two key heads, and of four ranks two have the same key head."""
    tiny_checkpoint("Qwen3ForCausalLM", tmp_path)
    assert of_ranks(tmp_path, HEADS) == ["[(2, 2)]", "[(1, 2)]", "[(1, 1)]"]


def test_stages_have_the_kernels_of_their_layers_and_the_last_one_draws(tmp_path: Path) -> None:
    tiny_checkpoint("Qwen3ForCausalLM", tmp_path, num_hidden_layers=2)
    assert of_ranks(tmp_path, STAGES) == ["False True True True", "True"]


def test_ranks_and_replicas_that_share_whole_experts_have_their_variants(tmp_path: Path) -> None:
    """A rank multiplies alike whoever shares experts with it, but one by one in the other transport."""
    tiny_checkpoint("Qwen3MoeForCausalLM", tmp_path, num_experts=8)
    assert of_ranks(tmp_path, EXPERTS) == ["True"] * 5


def test_a_cpu_needs_no_triton(tmp_path: Path) -> None:
    tiny_checkpoint("LlamaForCausalLM", tmp_path)
    program = """
import sys
from pathlib import Path
from sizes import worker_config
from models.config import read_config
from worker.runner import Runner

folder = Path(sys.argv[1])
Runner(worker_config(folder=str(folder), model=read_config(folder)), lambda phase, part: None).close()
assert "triton" not in sys.modules
"""
    run_uninterpreted(program, tmp_path)


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
from worker.kernels.cuda.capabilities import Card
from machine_code import NoDevice
from worker.kernels.cuda.compiling.model_variants import compiling
from worker.kernels.cuda.launch import compilations, count_compilations
from worker.kernels.cuda.operations import cuda_operations

folder = Path(sys.argv[1])
count_compilations()
driver.set_active(NoDevice(90))
device = Cuda.__new__(Cuda)
device.target, device._card = torch.device("cpu"), Card(90, 132)
device.kernels, device._fp8, device._head_dim = cuda_operations(device._card), False, 16
proved = []
device._prove = lambda dtype, uses, minimum: proved.append((dtype, uses.is_known))
dtypes = torch.bfloat16, torch.bfloat16
model = read_config(folder)

def of(rank, ranks):
    place = Place(tensor_rank=rank, tensor_size=ranks, local_rank=rank, local_ranks=ranks)
    served = Conversion(runner="generate", convert="none", architecture=model.architecture)
    return WorkerConfig(folder=str(folder), model=model, conversion=served, place=place)

with device.while_loading(of(0, 1), dtypes, 64, Parallel(), int):
    pass
print(alone := compilations(), ops.rms_norm is device.kernels["rms_norm"])
for rank in (0, 1):
    with device.while_loading(of(rank, 2), dtypes, 64, Parallel(rank, 2), int):
        pass
    print(compilations() - alone)
assert proved == [(torch.bfloat16, True)] * 3

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
    run = run_uninterpreted(LOADING, folder, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    alone, of_first, of_both, begun, *loads = run.stdout.splitlines()
    compiled, bound = alone.split()
    assert (int(compiled) >= 8, bound) == (True, "True")
    assert any((tmp_path / "cache").rglob("multiply.cubin")), "also those of quantized matrices"
    assert 0 < int(of_first) <= int(of_both), "two ranks have other variants than one alone"
    assert begun == str([*range(7), 2, 3, 4, 5, 6, 0, 1, 4, 5, 6, 0, 1, 2, 3]), "each begins elsewhere"
    assert loads == ["loads", "loads"]
    assert "when first started: odd config" in run.stderr
    assert "1 of 1 kernels did not compile ahead: odd kernel" in run.stderr
