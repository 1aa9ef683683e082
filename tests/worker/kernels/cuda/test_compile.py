"""Every variant of a model's kernels compiles for cards that are not here, and fits them.

The interpreter runs kernels in the process of these tests, so the compiler has one of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from packed import change_config
from tiny import tiny_checkpoint

PROGRAM = """
import sys
from pathlib import Path
import torch
from models.config import read_config
from worker.kernels.cuda.compile import compile_ahead, faults, model_calls

folder, capability = Path(sys.argv[1]), int(sys.argv[2])
calls = model_calls(read_config(folder), folder, torch.bfloat16, capability)
for made in compile_ahead(calls, capability):
    print(made.name.partition("(")[0], made.matrix_unit, faults(made, capability), sep=";")
"""
SECONDS = 150
ROOT = Path(__file__).parents[4]
DECODER = (
    "norm",
    "prepare_and_cache",
    "attend",
    "norm",
    "activate",
    "attend",
    "join",
    "attend",
    "lay_out_any",
    "lay_out_rows",
    "lay_out_samples",
    "survey_groups",
    "draw_row",
    "merge_rows",
    "merge_rows",
)
QUANTIZED: dict[str, dict[str, object]] = {
    "awq": {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "fp8": {"weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def compiled(folder: Path, capability: int) -> list[list[str]]:
    """The name, the instructions of the matrix unit and the faults of each variant."""
    return [line.split(";") for line in lines_of(PROGRAM, folder, capability)]


def lines_of(program: str, *given: object) -> list[str]:
    """What a program prints that compiles kernels, in a process in which nothing is interpreted."""
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


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 86, 89, 100, 120))]
)
def test_a_decoder_compiles_ahead(tmp_path: Path, capability: int) -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 128}
    tiny_checkpoint("Qwen3ForCausalLM", tmp_path, **shape, num_key_value_heads=8, num_hidden_layers=1)
    found = compiled(tmp_path, capability)
    assert tuple(name for name, _, _ in found) == DECODER
    assert [fault for _, _, fault in found if fault] == []
    assert all(int(matrix_unit) > 0 for name, matrix_unit, _ in found if name == "attend")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("method", QUANTIZED)
def test_a_quantized_decoder_compiles_ahead(tmp_path: Path, capability: int, method: str) -> None:
    tiny_checkpoint("Qwen3ForCausalLM", tmp_path, hidden_size=256, intermediate_size=384)
    (tmp_path / "model.safetensors").unlink()  # it is not quantized
    change_config(tmp_path, quantization_config={"quant_method": method, **QUANTIZED[method]})
    found = compiled(tmp_path, capability)
    many = {"widen_rows"}
    if method == "fp8" and capability >= 89:  # torch multiplies blocks on 9.0
        many = {"round_rows"} if capability == 90 else {"round_rows", "multiply_rounded"}
    assert {"multiply", *many} <= {name for name, _, _ in found}
    assert [fault for _, _, fault in found if fault] == []
    assert all(int(matrix_unit) > 0 for name, matrix_unit, _ in found if "multiply" in name)


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 89))]
)
def test_latent_attention_compiles_ahead(tmp_path: Path, capability: int) -> None:
    """The widths are those of DeepSeek's models, the number of heads is no power of two."""
    widths = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    shape = {"num_attention_heads": 20, "num_key_value_heads": 20, "num_hidden_layers": 1}
    tiny_checkpoint("YoutuForCausalLM", tmp_path, **widths, **shape)
    found = compiled(tmp_path, capability)
    names = [name for name, _, _ in found]
    assert {"norm_front", "prepare_latent", "join"} <= set(names)
    assert names.count("attend_latent") == 3, "decoding rows, split or not, and prompts"
    assert names.count("attend_made") == 1, "long prompts"
    assert [fault for _, _, fault in found if fault] == []
    assert all(int(matrix_unit) > 0 for name, matrix_unit, _ in found if name.startswith("attend_"))


@pytest.mark.slow
def test_a_mixture_compiles_ahead(tmp_path: Path) -> None:
    tiny_checkpoint("Qwen3MoeForCausalLM", tmp_path, hidden_size=256)
    found = compiled(tmp_path, 90)
    assert {"sort_pairs", "multiply", "add_pairs"} <= {name for name, _, _ in found}
    assert [fault for _, _, fault in found if fault] == []


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


DRAW = """
import sys
import torch
from worker.kernels.cuda.compile import NOWHERE, compile_ahead, faults
from worker.kernels.cuda.launch import collecting
from worker.kernels.cuda.sampling.draw import draw, filters
from worker.sampling.groups import BY_TORCH, GroupedLogits

capability = int(sys.argv[1])
with collecting() as calls:
    draw(GroupedLogits(torch.empty(4, 151_936, device=NOWHERE), BY_TORCH), filters(NOWHERE))
for made in compile_ahead(calls, capability):
    print(made.name.partition("(")[0] + ":" + faults(made, capability))
"""


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 86, 89, 100, 120))]
)
def test_a_draw_from_a_wide_vocabulary_compiles_ahead(capability: int) -> None:
    run = subprocess.run(
        [sys.executable, "-c", DRAW, str(capability)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == ["survey_groups:", "draw_row:"], "nothing is wrong with either"


@pytest.mark.slow
def test_an_encoder_compiles_ahead(tmp_path: Path) -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
    tiny_checkpoint("BertModel", tmp_path, **shape, num_hidden_layers=1)
    found = compiled(tmp_path, 90)
    assert sorted({name for name, _, _ in found}) == [
        "activate",
        "attend",
        "lay_out_any",
        "merge_rows",
        "norm",
    ]
    assert [fault for _, _, fault in found if fault] == []


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
