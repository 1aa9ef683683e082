"""The list of a model's kernels is that of each rank, stage and replica which serves it.

The interpreter runs kernels in the process of these tests, so lists are made in another one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny import tiny_checkpoint

SECONDS = 150
ROOT = Path(__file__).parents[4]

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def lines_of(program: str, *given: object) -> list[str]:
    """What a program prints that lists kernels, in a process in which nothing is interpreted."""
    run = subprocess.run(
        [sys.executable, "-c", program, *map(str, given)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.splitlines()


RANKS = """
import sys
from functools import partial
from pathlib import Path
import torch
from models.config import read_config
from worker.kernels.cuda.compile import calls_of_ranks, describe, model_calls

folder = Path(sys.argv[1])
model = partial(model_calls, read_config(folder), folder, torch.bfloat16, 90)

def names(calls):
    return {call.kernel.fn.__name__ for call in calls}

def values(calls, *parameters):  # what calls give to these parameters of kernels
    found = [dict(zip(call.kernel.arg_names, call.arguments)) for call in calls]
    return {tuple(each[name] for name in parameters) for each in found if each.keys() >= {*parameters}}
"""
HEADS = """
for ranks in (1, 2, 4):
    print(sorted(values(calls_of_ranks(model, ranks), "HEADS", "GROUP")))
"""
STAGES = """
from models.parallel.parallel import Parallel

whole = names(model())
first, last = (names(model(parallel=Parallel(stage=stage, stages=2))) for stage in range(2))
print("draw_row" in first, "draw_row" in last, "attend" in first & last, first | last == whole)
print(names(calls_of_ranks(model, 2, stages=2)) == whole)
"""
EXPERTS = """
from torch import Tensor

def inner_widths(calls):  # the least widths of what experts multiply
    return [min(x.shape[-1] for x in call.arguments if isinstance(x, Tensor) and x.ndim > 1)
            for call in calls if call.kernel.fn.__name__ == "multiply"]

whole, cut, shared = (calls_of_ranks(model, ranks, whole_experts=apart)
                      for ranks, apart in ((1, False), (2, False), (2, True)))
print(names(whole) == names(cut) == names(shared))
print(min(inner_widths(cut)) * 2 == min(inner_widths(shared)) == min(inner_widths(whole)))
print(len(calls_of_ranks(model, 1, whole_experts=True)) == len(whole))

def of_experts(ranks, **given):  # what is started for experts
    calls = calls_of_ranks(model, ranks, whole_experts=True, **given)
    kernels = ("sort_pairs", "multiply", "add_pairs")
    return {describe(call) for call in calls if call.kernel.fn.__name__ in kernels}

print(of_experts(1, replicas=4) == of_experts(4) == of_experts(2, replicas=2) != of_experts(1))
one_by_one = of_experts(1, replicas=4, transport="all_to_all")
print(one_by_one == of_experts(4, transport="all_to_all") != of_experts(4))
"""


def of_ranks(folder: Path, program: str) -> list[str]:
    return lines_of(RANKS + program, folder)


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
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")},
        check=True,
        timeout=SECONDS,
    )
