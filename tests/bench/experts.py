"""Measures layers of experts in process, beside what reading the touched experts takes at least.

OMP_WAIT_POLICY=PASSIVE PYTHONPATH=. python tests/bench/experts.py [int8 | int8-dynamic | int4]

Calls are recorded once and replayed without Python between them, as those of a served model's steps are.
Memory is read before each run, for its rate changes on a shared machine; ratios are of neighbours in time.
torch reads it, and its threads would keep both cores busy for milliseconds afterwards if they did not wait
passively.
"""

import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from models.ops.expert_ops import Routing
from worker.kernels.cpu import operations
from worker.kernels.cpu.library import Library
from worker.kernels.cpu.recording import as_word
from worker.kernels.cpu.tensors import allocated_by
from worker.kernels.cpu.torch_operations import Table

_LAYERS, _SIZE, _INNER, _RUNS = 12, 1024, 512, 30
_ROUTING = Routing(experts=32, chosen=8)
_ROWS = (1, 8, 32, 512)


@dataclass(frozen=True)
class _Layer:
    router: Tensor
    gate_up: Sequence[Tensor]
    down: Sequence[Tensor]


class _Script:
    """The calls of all layers for so many rows, and the experts that each layer chooses."""

    def __init__(self, library: Library, table: Table, layers: Sequence[_Layer], x: Tensor) -> None:
        self._words, self._count = array("q"), 0
        self._kept: list[Tensor] = []
        self.chosen: list[Tensor] = []
        self._replay = library.function("replay")
        with library.record_to(self._call), allocated_by(self._empty):
            for layer in layers:
                ids, weights = table["route"](x, layer.router, None, None, _ROUTING)
                table["experts"](x, ids, weights, layer.gate_up, layer.down, "silu")
                self.chosen.append(ids)

    def run(self) -> None:
        self._replay(self._words.buffer_info()[0], self._count)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a result, which stays its own: the calls know its address."""
        self._kept.append(torch.empty(tuple(shape), dtype=dtype))
        return self._kept[-1]

    def _call(self, name: str, entry: int | None, types: Sequence[Any], arguments: Sequence[Any]) -> None:
        assert entry is not None, name
        self._count += 1
        self._words.extend((entry, len(arguments), *map(as_word, types, arguments)))


def main(scheme: str | None) -> None:
    table = operations.open_kernels(2, scheme)
    library, _ = operations.choose_kernels()
    assert library is not None, "there are no C kernels for this processor"
    layers = _layers(table)
    size = sum(matrices[0].nbytes for matrices in (layers[0].gate_up, layers[0].down))
    data = torch.ones(1 << 26)
    torch.set_num_threads(2)
    print(f"{scheme or 'bfloat16'}: an expert has {size / 1e6:.2f} MB")
    for rows in _ROWS:
        x, times, ratios = torch.empty(rows, _SIZE).bfloat16(), [], []
        script = _Script(library, table, layers, x)
        for _ in range(_RUNS):
            x.copy_(torch.randn(rows, _SIZE))
            started = time.perf_counter()
            data.sum()
            read = time.perf_counter()
            script.run()
            times.append(time.perf_counter() - read)
            touched = sum(len(ids.unique()) for ids in script.chosen) * size
            ratios.append(touched / data.nbytes * (read - started) / times[-1])
        typical = median(times)
        operations_done = 6 * rows * _ROUTING.chosen * _SIZE * _INNER * _LAYERS
        print(
            f"{rows:4} rows: {1e3 * typical:7.2f} ms (least {1e3 * min(times):.2f}), "
            f"{median(ratios):.2f} of the floor ({min(ratios):.2f} to {max(ratios):.2f}), "
            f"{operations_done / typical / 1e12:.2f} TFLOP/s"
        )


def _layers(table: Table) -> list[_Layer]:
    """More bytes than any cache holds."""
    matrices = [torch.randn(shape).bfloat16() / 32 for shape in ((2 * _INNER, _SIZE), (_SIZE, _INNER))]
    layers: list[_Layer] = []
    for _ in range(_LAYERS):
        gate_up = [table["pack"](matrices[0], gated=True) for _ in range(_ROUTING.experts)]
        down = [table["pack"](matrices[1], sections=8) for _ in range(_ROUTING.experts)]
        router = table["pack"](torch.randn(_ROUTING.experts, _SIZE).bfloat16() / 32, plain=True)
        layers.append(_Layer(router, table["collect_experts"](gate_up), table["collect_experts"](down)))
    return layers


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
