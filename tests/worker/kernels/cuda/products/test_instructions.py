"""What products with quantized matrices cost, read from compiled code: few instructions for each weight.

An H100 starts 33 * 10^12 instructions of a lane in a second: of a matrix of 8,192 x 8,192 each instruction
for a weight takes 2 us, and with 4 bits it is read in 12 us.
"""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from uninterpreted import run_uninterpreted

BOUNDS = {
    "4 bits, groups of 128": (4, 128, "whole", 4.2, 5.0),
    "4 bits, groups of 128, zero points": (4, 128, "zeros", 4.4, 5.4),
    "4 bits, groups of 32": (4, 32, "whole", 6.6, 7.2),
    "8 bits, groups of 128": (8, 128, "whole", 6.4, 6.4),
    "e2m1, groups of 32": (4, 32, "e2m1", 7.0, 7.4),
}
"""Bits, group and kind, and the most instructions for each weight with up to 16 rows on 9.0, and on 8.0."""

PROGRAM = """
import json, sys, tempfile
import torch
from models.ops.grouped_matrix import Grouped
from models.weight_coding import E2M1, WHOLE
from triton.runtime import driver
from worker.kernels.cuda.capabilities import Card
from machine_code import NoDevice, _JUMP, _LINE, _read_cubin, faults, inspect
from worker.kernels.cuda.launch import collecting
from worker.kernels.cuda.operations import cuda_operations

SIDE, capability, forms = 8192, int(sys.argv[1]), json.loads(sys.argv[2])

def instructions_of_the_longest_loop(made):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        lines = [(int(at, 16), text) for at, text in _LINE.findall(_read_cubin("-sass", file.name))]
    jumps = [(int(jump[1], 16), at) for at, text in lines if (jump := _JUMP.search(text))]
    return max(sum(first <= at <= last for at, _ in lines) for first, last in jumps if first < last)

def empty(*shape, dtype=torch.uint8):
    return torch.empty(shape, dtype=dtype, device="meta")

operations = cuda_operations(Card(capability, 132))
driver.set_active(NoDevice(capability))
for name, (bits, group, kind, *_) in forms.items():
    groups = empty(SIDE, SIDE // group)
    scales = groups.view(torch.float8_e8m0fnu) if kind == "e2m1" else groups.half()
    zeros = groups if kind == "zeros" else None
    meant = E2M1 if kind == "e2m1" else WHOLE
    matrix = Grouped(empty(SIDE, SIDE), bits, group, scales, zeros, SIDE, torch.bfloat16, kind=meant)
    with torch.inference_mode(), collecting() as calls:
        operations["linear"](empty(1, SIDE, dtype=torch.bfloat16), operations["pack"](matrix))
    call = next(call for call in calls if call.kernel.fn.__name__ == "multiply")
    given = dict(zip([each.name for each in call.kernel.params], call.arguments))
    made = call.prepare()
    weights = given["BN"] * given["FORM"].tile / (32 * call.options["num_warps"])
    found = instructions_of_the_longest_loop(made) / weights
    print(json.dumps([name, found, faults(inspect(name, made), capability), call.grid]))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("capability", [80, 90])
def test_few_instructions_decode_a_weight(capability: int) -> None:
    run = run_uninterpreted(PROGRAM, capability, json.dumps(BOUNDS), timeout=280)
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert [name for name, *_ in found] == [*BOUNDS]
    for name, instructions, fault, grid in found:
        assert instructions <= BOUNDS[name][3 if capability == 90 else 4], (name, instructions)
        assert not fault
        programs = grid[0] * grid[1] * grid[2]
        assert 3 * 132 < programs <= 4 * 132, "all run at once, several on each multiprocessor"
