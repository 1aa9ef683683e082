"""Requests with sources, answered by a whole engine."""

from pathlib import Path
from typing import Any

from sizes import engine_config

from engine_core.engine import Engine
from engine_core.protocol import AddRequest, Failed, Tokens

Found = dict[int, tuple[list[int], list[float]]]
"""The type of the tokens and logprobs of each request."""


def answer_all(
    folder: Path,
    requests: list[AddRequest],
    at_once: int = 99,
    told: list[list[float]] | None = None,
    **options: Any,
) -> tuple[Found, Engine]:
    """Run requests, of which `at_once` come with each step -> tokens and logprobs of each."""
    sizes = {"block_size": 16, "num_gpu_blocks_override": 32, "max_num_batched_tokens": 64, **options}
    engine = Engine.start(engine_config(folder, cpu_threads=1, **sizes), lambda _: None)
    found: Found = {each.id: ([], []) for each in requests}
    waiting = list(requests)
    while waiting or engine.busy:
        for each in waiting[:at_once]:
            engine.add(0, each)
        del waiting[:at_once]
        for answer in engine.step().get(0, []):
            assert not isinstance(answer, Failed), answer
            if isinstance(answer, Tokens):
                tokens, logprobs = found[answer.id]
                tokens += answer.tokens
                logprobs += [each.values[0] for each in answer.logprobs]
                if told is not None:
                    told += [each.told for each in answer.logprobs]
    engine.stop()
    return found, engine
