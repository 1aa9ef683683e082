"""Engines in the process of a test: it runs their steps until nothing is left to do."""

from collections.abc import Iterable

from engine_core.engine import Engine
from engine_core.protocol import Output, OutputsByClient, Tokens


def run_all(engine: Engine) -> OutputsByClient:
    """The outputs of all steps, by client."""
    told: OutputsByClient = {}
    while engine.busy:
        for client, outputs in engine.step().items():
            told.setdefault(client, []).extend(outputs)
    return told


def run(engine: Engine) -> dict[int, list[Output]]:
    """The outputs for client 0, by request."""
    told: dict[int, list[Output]] = {}
    for output in run_all(engine).get(0, []):
        told.setdefault(output.id, []).append(output)
    return told


def text(outputs: Iterable[Output]) -> list[int]:
    return [token for output in outputs if isinstance(output, Tokens) for token in output.tokens]
