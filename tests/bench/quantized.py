"""Times the linear layers of a 0.6B Qwen3 with matrices of every form, in turns; a table in Markdown.

    python tests/bench/quantized.py [--rows 1 8 32] [--only int8 fp8] [--layers 12] [--turns 8] [--level avx2]

The figures are milliseconds for all layers, the least of all turns: in each turn every form computes once
with each number of rows, so that a machine which is busy for a while slows all of them down. 12 layers do not
fit into a third-level cache of 32 MiB, in any form.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from forms import FORMS, Shape

from models.ops.grouped_matrix import Grouped, Matrix
from models.weight_coding import E4M3
from worker.kernels.cpu import linear
from worker.kernels.cpu.library import levels_here, open_library
from worker.kernels.cpu.quantization import SCHEMES, Scheme
from worker.kernels.cpu.torch_operations import Table

SHAPES = ((4096, 1024, False), (1024, 2048, False), (6144, 1024, True), (1024, 3072, False))
"""The matrices of a layer: outputs, inputs, and whether half of the outputs are gates."""

BFLOAT16 = torch.bfloat16


@dataclass(frozen=True)
class Kind:
    """A form of matrices, and how plain ones are quantized while they are packed."""

    make: Callable[[int, int], Matrix]
    scheme: Scheme | None = None


def _plain(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, dtype=BFLOAT16)


def _whole(
    bits: int, group: int, *, zeros: bool = False, ordered: bool = False, input_bits: int = 16
) -> Kind:
    def make(outputs: int, inputs: int) -> Grouped:
        shape = Shape(outputs, inputs, BFLOAT16, input_bits)
        matrix = shape.made(bits, group, shape.numbers(group))
        codes = torch.randint(1 << bits, matrix.scales.shape, dtype=torch.uint8)
        order = torch.randperm(inputs).int() if ordered else None
        return replace(matrix, offsets=codes if zeros else None, order=order)

    return Kind(make)


def _float(outputs: int, inputs: int) -> Grouped:
    shape = Shape(outputs, inputs, BFLOAT16)
    matrix = shape.made(8, 128, shape.numbers(128).float(), E4M3)
    return replace(matrix, codes=matrix.codes & 0x77)


def _named(name: str, input_bits: int) -> Kind:
    return Kind(lambda outputs, inputs: FORMS[name](Shape(outputs, inputs, BFLOAT16, input_bits)))


KINDS: dict[str, Kind] = {
    "bfloat16": Kind(_plain),
    **{name: Kind(_plain, scheme) for name, scheme in SCHEMES.items()},
    "4 bits, groups of 128": _whole(4, 128),
    "4 bits, groups of 128, zero points": _whole(4, 128, zeros=True),
    "4 bits, groups of 128, act-order": _whole(4, 128, ordered=True),
    "4 bits, groups of 128, 8-bit inputs": _whole(4, 128, input_bits=8),
    "4 bits, groups of 32": _whole(4, 32),
    "8 bits, groups of 128": _whole(8, 128),
    "fp8, groups of 128": Kind(_float),
    **{name: _named(name, 16) for name in FORMS},
    **{f"{name}, 8-bit inputs": _named(name, 8) for name in FORMS},
}


class Layers:
    """The packed matrices of some layers in one form."""

    def __init__(self, kind: Kind, layers: int, library_table: Callable[[Scheme | None], Table]) -> None:
        self._table = library_table(kind.scheme)
        made = [kind.make(outputs, inputs) for outputs, inputs, _ in SHAPES]
        self._matrices = [
            (self._table["pack"](matrix, gated=gated), inputs, gated)
            for _ in range(layers)
            for matrix, (_, inputs, gated) in zip(made, SHAPES, strict=True)
        ]
        self.mib = sum(matrix.nbytes for matrix, _, _ in self._matrices) / 2**20

    def time(self, rows: int) -> float:
        """Compute all layers once; -> milliseconds."""
        inputs = {width: torch.randn(rows, width, dtype=BFLOAT16) for _, width, _ in SHAPES}
        begin = time.perf_counter()
        for matrix, width, gated in self._matrices:
            if gated:
                self._table["gated_linear"](inputs[width], matrix, None, "silu")
            else:
                self._table["linear"](inputs[width], matrix)
        return (time.perf_counter() - begin) * 1e3


def _measure(layers: dict[str, Layers], rows: Sequence[int], turns: int) -> dict[str, list[float]]:
    best = {name: [float("inf")] * len(rows) for name in layers}
    for _ in range(turns):
        for name, each in layers.items():
            best[name] = [min(old, each.time(count)) for old, count in zip(best[name], rows, strict=True)]
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--level", choices=[level.name for level in levels_here()])
    given = parser.parse_args()
    level = next(level for level in levels_here() if given.level in (None, level.name))
    library = open_library(level)
    library.function("set_threads")(2)
    layers = {
        name: Layers(KINDS[name], given.layers, lambda scheme: linear.bind(library, scheme))
        for name in given.only
    }
    best = _measure(layers, given.rows, given.turns)
    print("|", level.name, "|", " | ".join(f"{count} rows" for count in given.rows), "| MiB |")
    print("|---|", "---:|" * (len(given.rows) + 1), sep="")
    for name, found in best.items():
        print("|", name, "|", " | ".join(f"{each:.1f}" for each in found), f"| {layers[name].mib:.0f} |")


if __name__ == "__main__":
    main()
