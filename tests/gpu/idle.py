"""How much of a step the device waits for the host."""

from __future__ import annotations

from collections.abc import Iterator

from dummy import Dummy
from results import Result


def measure_idle_share(dummy: Dummy, case: str, rows: int, step: float, host: float) -> Iterator[Result]:
    """The parts of a step that took `step` seconds, of which the host took `host` to launch it."""
    name = dummy.shape.name
    yield Result(f"{name} host's part of a step, {case}", "", 1e6 * host, "us")
    device = dummy.replayed_seconds(rows)
    if device is None:
        missing = int(dummy.bench.on_card)
        yield Result(f"{name} idle share of a step, {case}", "the step is no graph", wrong=missing)
        return
    yield Result(f"{name} device's part of a step, {case}", "", 1e3 * device, "ms")
    yield Result(f"{name} idle share of a step, {case}", "", 100 * max(0.0, 1 - device / step), "%")
