"""Compiles kernels for cards that are not here, and reads registers and instructions from the code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from models.parallel.experts import ExpertPlace, Transport
from models.parallel.parallel import Parallel, Replicas
from worker.kernels.cuda.compiling.model_variants import OtherRanks, describe, one_of_each
from worker.kernels.cuda.launch import KernelLaunch

SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""Shared memory of a block of threads, by compute capability."""

_MATRIX_UNIT = re.compile(r"\b(HMMA|HGMMA|QMMA|QGMMA|UTCHMMA|UTCQMMA)\b")
_PRODUCT = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*")
"""An instruction for the matrix unit in PTX, which the assembler makes machine code of."""
_LINE = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+([^;]*);", re.MULTILINE)
_JUMP = re.compile(r"\bBRA\b.*?0x([0-9a-f]+)")
_SPILL = re.compile(r"\b(?:LDL|STL)\b")
_FEW = 10
"""The instructions that may put registers aside around loops: they are no more than a few for a program."""
_REGISTERS = re.compile(r"REG:(\d+) STACK:(\d+)")

_units: dict[tuple[object, frozenset[str]], tuple[str, ...]] = {}
"""The kinds of instructions of the matrix unit, by the capability and by what PTX has for products."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler made of one variant."""

    name: str
    registers: int
    spills: int
    """Instructions within loops that keep registers in memory: each costs time."""
    put_aside: int
    """Instructions outside of all loops that keep registers in memory, so that more threads fit."""
    shared: int
    """Bytes of shared memory of a block of threads."""
    matrix_unit: tuple[str, ...]
    """The kinds of its instructions of the matrix unit.

    HMMA takes 16 bits and QMMA 8 out of registers. HGMMA and QGMMA (on 9.0) and UTCHMMA and UTCQMMA (on 10.0)
    read tiles from shared memory, while the threads go on.
    """


def inspect(name: str, made: Any) -> Compiled:
    """Look at a kernel that Triton has compiled. `name`: what its variant is called."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _REGISTERS.search(_read_cubin("-res-usage", file.name))
        assert usage is not None  # there is one kernel in the file
        registers, stack = map(int, usage.groups())
        # Writing all instructions down takes as long as compiling: for the same products once is enough.
        products = made.metadata.target.arch, frozenset(_PRODUCT.findall(made.asm["ptx"]))
        is_asked = stack > 0 or products not in _units
        code = _read_cubin("-sass", file.name) if is_asked else ""
    spills, put_aside = _count_spills(code)
    if code:
        _units[products] = tuple(sorted(set(_MATRIX_UNIT.findall(code))))
    return Compiled(
        name,
        registers=registers,
        spills=spills,
        put_aside=put_aside,
        shared=made.metadata.shared,
        matrix_unit=_units[products],
    )


def faults(made: Compiled, capability: int) -> str:
    """What is wrong with a variant on a card; "" if nothing is."""
    limit = SHARED_KIB[capability] * 1024
    if made.shared > limit:
        return f"it takes {made.shared} bytes of shared memory, and there are {limit}"
    if made.spills or made.put_aside > _FEW:
        return f"registers are spilled, {made.spills} times in loops and {made.put_aside} times elsewhere"
    return ""


def _count_spills(code: str) -> tuple[int, int]:
    """How many instructions spill registers: within loops, which end with a jump to before, and elsewhere."""
    lines = [(int(address, 16), text) for address, text in _LINE.findall(code)]
    jumps = [(int(jump[1], 16), address) for address, text in lines if (jump := _JUMP.search(text))]
    loops = [(first, last) for first, last in jumps if first <= last]
    spills = [address for address, text in lines if _SPILL.search(text)]
    within = sum(any(first <= address <= last for first, last in loops) for address in spills)
    return within, len(spills) - within


def _read_cubin(option: str, path: str) -> str:
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([program, option, path], capture_output=True, text=True, check=True).stdout


class NoDevice:
    """Triton's view of a card that is not there: all that it asks for in order to compile."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # the key of Triton's caches of kernels

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_ahead(calls: Sequence[KernelLaunch], capability: int, threads: int = 1) -> Iterator[Compiled]:
    """Compile these calls' variants for a compute capability such as 90, in their order.

    Nothing can be computed on a device in this process afterwards.
    """
    driver.set_active(NoDevice(capability))  # pyright: ignore[reportArgumentType]
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(_compile, calls)


def calls_of_ranks(
    make_calls: Callable[..., list[KernelLaunch]],
    ranks: int,
    stages: int = 1,
    *,
    whole_experts: bool = False,
    replicas: int = 1,
    transport: Transport = "allgather_reducescatter",
) -> list[KernelLaunch]:
    """The calls that so many ranks of each stage make, one for each variant.

    `make_calls` is `model_calls` with all arguments but `parallel`. `whole_experts`: whether ranks share
    experts, instead of the width of each. `replicas`: how many share them, with so many ranks each.
    """
    sharing = ranks * replicas if whole_experts else 1
    places = [
        Parallel(
            rank,
            ranks,
            stage=stage,
            stages=stages,
            experts=ExpertPlace(replica * ranks + rank, sharing, transport=transport)
            if sharing > 1
            else None,
            replicas=Replicas(replica, replicas, OtherRanks(replicas)) if replicas > 1 else None,
        )
        for stage in range(stages)
        for replica in range(replicas)
        for rank in range(ranks)
    ]
    return one_of_each(call for place in places for call in make_calls(parallel=place))


def _compile(call: KernelLaunch) -> Compiled:
    return inspect(describe(call), call.prepare())
