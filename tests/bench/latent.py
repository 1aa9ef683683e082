"""Measures latent attention in process, beside what reading its cached rows and its matrices takes at least.

PYTHONPATH=.:tests/support python tests/bench/latent.py [prompts]

Memory is read before each run, for its rate changes on a shared machine; ratios are of neighbours in time.
With `prompts`, whole prompts are computed instead, beside plain attention to keys and values of all heads.
"""

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from paged import make_step
from torch import Tensor

from models.context import ForwardContext
from models.ops import latent_ops
from worker.host.memory import huge_pages
from worker.kernels.cpu import operations

_SHAPES = {
    "DeepSeek-V2-Lite": (16, 512, 128, 64, 128),
    "GLM-4.7-Flash": (20, 512, 192, 64, 256),
    "GLM-4.7-Flash, one of 4 ranks": (5, 512, 192, 64, 256),
    "DeepSeek-V3, one of 2 ranks": (64, 512, 128, 64, 128),
}
"""Heads, rank, and the widths of a head: without positions, rotated, of values."""
_CONTEXT, _ROWS, _PROMPTS, _RUNS = 4096, (1, 8, 32), (512, 2048, 4096), 15
_BYTES = 300 << 20
"""More than any cache holds."""


class Layer:
    """Matrices and cached rows of one layer, in bfloat16, and inputs of a step."""

    def __init__(self, table: operations.Table, shape: tuple[int, ...], step: ForwardContext) -> None:
        self.table, self.step = table, step
        self.heads, self.rank, self.nope, self.rope, self.value = shape
        self.weight = (
            torch.randn(self.heads * (self.nope + self.value), self.rank).bfloat16() / self.rank**0.5
        )
        self.up = table["pack_latent"](self.weight, self.heads, self.nope, self.rank)
        rows = torch.randn(step.block_table.numel(), step.block_size, self.rank + self.rope).bfloat16()
        self.cache = huge_pages(rows.nbytes).view(torch.bfloat16).view(rows.shape).copy_(rows)
        tokens = len(step.positions)
        self.q = torch.randn(tokens, self.heads, self.nope + self.rope).bfloat16()
        self.latent = torch.randn(tokens, self.rank + self.rope).bfloat16()
        self.cos_sin = torch.randn(tokens, self.rope)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.cache.nbytes

    def attend(self) -> Tensor:
        given = self.q, self.latent, self.up, self.cache, self.step, self.cos_sin
        return self.table["latent_attention"](*given, scale=0.1)

    def attend_by_reference(self) -> Tensor:
        up = latent_ops.pack_latent(self.weight, self.heads, self.nope, self.rank)
        given = self.q, self.latent, up, self.cache, self.step, self.cos_sin
        return latent_ops.latent_attention(*given, scale=0.1)

    def products(self) -> int:
        """Multiplications and sums of a whole prompt."""
        tokens = len(self.q)
        seen = self.heads * tokens * (tokens + 1) * (2 * self.rank + self.rope)
        return seen + 2 * self.heads * tokens * self.rank * (self.nope + self.value)


class Expanded:
    """The other form of a whole prompt: keys and values of all heads are made, and attended to."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.matrix = layer.table["pack"](layer.weight)
        dim, step = layer.nope + layer.rope, layer.step
        self.made = torch.zeros(2, step.block_table.numel(), layer.heads, step.block_size, dim).bfloat16()

    def attend(self) -> None:
        layer = self.layer
        layer.table["linear"](layer.latent[:, : layer.rank], self.matrix)
        layer.table["attention"](layer.q, self.made, layer.step, scale=0.1)


def seconds(work: Callable[[], object], threads: int = 1) -> float:
    torch.set_num_threads(threads)
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def decode(table: operations.Table, shape: tuple[int, ...], rows: int) -> str:
    step, data = make_step([1] * rows, [_CONTEXT] * rows, 32), torch.ones(1 << 26)
    layers = [Layer(table, shape, step)]
    layers += [Layer(table, shape, step) for _ in range(_BYTES // layers[0].nbytes)]
    times: list[float] = []
    ratios: list[float] = []
    for _ in range(_RUNS):
        read = seconds(data.sum, 2)
        times.append(seconds(lambda: [layer.attend() for layer in layers]) / len(layers))
        ratios.append(layers[0].nbytes / data.nbytes * read / times[-1])
    return (
        f"{rows:4} rows: {1e3 * median(times):7.3f} ms, {median(ratios):.2f} of the floor "
        f"({min(ratios):.2f} to {max(ratios):.2f}), {len(layers)} layers; "
        f"the reference {1e3 * seconds(layers[0].attend_by_reference, 2):.0f} ms"
    )


def prompt(table: operations.Table, shape: tuple[int, ...], tokens: int) -> str:
    layer = Layer(table, shape, make_step([tokens], [tokens], 32))
    expanded = Expanded(layer)
    ours = median(seconds(layer.attend) for _ in range(5))
    plain = median(seconds(expanded.attend) for _ in range(5))
    return (
        f"{tokens:5} tokens: {1e3 * ours:7.1f} ms, {layer.products() / ours / 1e12:.2f} TFLOP/s; "
        f"expanded {1e3 * plain:.1f} ms"
    )


def main(measure: Callable[[operations.Table, tuple[int, ...], int], str], sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    table = operations.open_kernels(2)
    for name, shape in _SHAPES.items():
        print(name)
        for size in sizes:
            print(measure(table, shape, size), flush=True)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    if sys.argv[1:] == ["prompts"]:
        main(prompt, _PROMPTS)
    else:
        main(decode, _ROWS)
