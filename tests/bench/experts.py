"""Measures layers of experts in process, beside what reading the touched experts takes at least.

PYTHONPATH=. python tests/bench/experts.py [int8 | int8-dynamic | int4]

Memory is read before each run, for its rate changes on a shared machine; ratios are of neighbours in time.
"""

from __future__ import annotations

import sys
import time
from statistics import median

import torch

from models.ops.routing import Routing
from worker.kernels.cpu import operations

_LAYERS, _SIZE, _INNER, _RUNS = 12, 1024, 512, 15
_ROUTING = Routing(experts=32, chosen=8)
_ROWS = (1, 8, 32, 512)


def main(scheme: str | None) -> None:
    table = operations.open_kernels(2, scheme)
    matrices = [torch.randn(shape).bfloat16() / 32 for shape in ((2 * _INNER, _SIZE), (_SIZE, _INNER))]
    layers = []
    for _ in range(_LAYERS):  # more bytes than any cache holds
        gate_up = [table["pack"](matrices[0], gated=True) for _ in range(_ROUTING.experts)]
        down = [table["pack"](matrices[1], sections=8) for _ in range(_ROUTING.experts)]
        router = table["pack"](torch.randn(_ROUTING.experts, _SIZE).bfloat16() / 32, plain=True)
        layers.append((router, table["collect_experts"](gate_up), table["collect_experts"](down)))
    size = layers[0][1][0].nbytes + layers[0][2][0].nbytes
    data = torch.ones(1 << 26)
    torch.set_num_threads(2)
    print(f"{scheme or 'bfloat16'}: an expert has {size / 1e6:.2f} MB")
    for rows in _ROWS:
        x, times, ratios = torch.randn(rows, _SIZE).bfloat16(), [], []
        for _ in range(_RUNS):
            started, touched = time.perf_counter(), 0
            data.sum()
            read = time.perf_counter()
            for router, gate_up, down in layers:
                ids, weights = table["route"](x, router, None, None, _ROUTING)
                table["experts"](x, ids, weights, gate_up, down, "silu")
                touched += len(ids.unique()) * size
            times.append(time.perf_counter() - read)
            ratios.append(touched / data.nbytes * (read - started) / times[-1])
        typical = median(times)
        operations_done = 6 * rows * _ROUTING.chosen * _SIZE * _INNER * _LAYERS
        print(
            f"{rows:4} rows: {1e3 * typical:7.2f} ms, {median(ratios):.2f} of the floor "
            f"({min(ratios):.2f} to {max(ratios):.2f}), {operations_done / typical / 1e12:.2f} TFLOP/s"
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
