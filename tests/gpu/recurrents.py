"""Rates of the layers of hybrids that have states, beside their floors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from paged import make_step
from results import Result
from workbench import Workbench

from models.context import ForwardContext, StateRows
from models.state_rows import StateRow, state_columns
from worker.kernels.compare_with_reference import moved

DECODING, PROMPTS = (1, 32, 256), (512, 2048)


@dataclass(frozen=True)
class _Layer:
    """An operation on states, and the sizes of its inputs and of one state."""

    name: str
    inputs: int
    state: tuple[int, ...]
    compute: Callable[[Workbench, torch.Tensor, torch.Tensor, ForwardContext], Callable[[], object]]


def measure_recurrents(bench: Workbench) -> Iterator[Result]:
    """Single tokens, whose floor is to read and write states, and prompts, which have none by the token."""
    for layer in _layers(bench):
        for rows in bench.some(DECODING):
            count = bench.rows(rows)
            took, state = _seconds(bench, layer, [1] * count, [9] * count)
            yield bench.bandwidth(f"{layer.name}, {rows} single tokens", 2 * count * state, took)
        for length in bench.some(PROMPTS[::-1]):
            tokens = bench.tokens(length)
            took, _ = _seconds(bench, layer, [tokens], [tokens])
            text = f"{1e9 * took / tokens:,.0f} ns for each token"
            yield Result(f"{layer.name}, prompt of {length}", text, 1e6 * took, "us")


def _seconds(bench: Workbench, layer: _Layer, new: list[int], total: list[int]) -> tuple[float, int]:
    """The seconds of a step of such sequences, and the bytes of a state."""
    rows = [StateRow(place, place) for place in range(len(new))]
    table = torch.tensor(state_columns(rows), dtype=torch.int32)
    step = moved(replace(make_step(new, total, 64), states=StateRows(table, rows)), bench.target)
    states = torch.zeros(len(new), *layer.state, device=bench.target)
    work = layer.compute(bench, bench.random(sum(new), layer.inputs), states, step)
    return bench.seconds_of(work), states[0].nbytes


def _layers(bench: Workbench) -> list[_Layer]:
    """Linear attention of Qwen3.6-35B-A3B with its convolution, and the scan of Granite 4.0 H Tiny."""
    key_heads, heads, dim = (16, 32, 128) if bench.on_card else (1, 2, 16)
    scanned, size, width = (48, 128, 64) if bench.on_card else (2, 16, 16)
    mixed = (2 * key_heads + heads) * dim

    def numbers(count: int) -> torch.Tensor:
        return -torch.rand(count, device=bench.target)

    def delta(bench: Workbench, x: torch.Tensor, states: torch.Tensor, step: Any) -> Callable[[], object]:
        gates, speeds, shifts = bench.random(len(x), 2 * heads), numbers(heads), numbers(heads)
        learn = bench.operations["gated_delta"]
        return lambda: learn(x, gates, speeds, shifts, states, step, key_heads)

    def scan(bench: Workbench, x: torch.Tensor, states: torch.Tensor, step: Any) -> Callable[[], object]:
        steps, given = bench.random(len(x), scanned), [numbers(scanned) for _ in range(3)]
        read = bench.operations["selective_scan"]
        return lambda: read(x, steps, *given, (0.0, 1.0), states, step, 1)

    def convolve(bench: Workbench, x: torch.Tensor, states: torch.Tensor, step: Any) -> Callable[[], object]:
        weight = torch.randn(4, mixed, device=bench.target)
        return lambda: bench.operations["causal_conv"](x, weight, None, states, step, "silu")

    return [
        _Layer("delta rule", mixed, (heads, dim, dim), delta),
        _Layer("scan", scanned * width + 2 * size, (scanned, size, width), scan),
        _Layer("short convolution", mixed, (3, mixed), convolve),
    ]
