"""Small engines, whose steps may be replayed as graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bits_traffic import Result, answers
from sizes import engine_config

from engine_core.engine import Engine
from engine_core.protocol import AddRequest

_OPTIONS: dict[str, Any] = {
    "max_num_seqs": 3,
    "block_size": 4,
    "max_model_len": 20,
    "num_gpu_blocks_override": 7,  # three sequences fit, and their blocks do not
    "enable_prefix_caching": True,
    "cpu_threads": 1,
    "device": "cpu",
}


def run(
    folder: Path,
    requests: Sequence[AddRequest],
    executor: object = None,
    *,
    ready: Any = None,
    **options: Any,
) -> tuple[dict[int, Result], int]:
    """All results, and how often a sequence lost its place. `ready` is called when all graphs are made."""
    engine = Engine.start(engine_config(folder, **{**_OPTIONS, **options}), lambda _: None, executor)
    try:
        while engine.prepare(wait=True):
            pass
        if ready is not None:
            ready()
        return answers(engine, requests), engine.stats().preemptions
    finally:
        engine.stop()


def generated(
    folder: Path, requests: Sequence[AddRequest], executor: object = None, **options: Any
) -> tuple[dict[int, list[int]], int]:
    """The tokens of all requests, and how often a sequence lost its place."""
    results, preemptions = run(folder, requests, executor, **options)
    return {id: result.tokens for id, result in results.items()}, preemptions
