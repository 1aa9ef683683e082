"""The sizes that a worker runs with, and those that contradict each other."""

from __future__ import annotations

import pytest
from sizes import MODEL, worker_config

from worker.devices.cpu import Cpu
from worker.limits import Limits, resolve_limits


def test_sizes_by_default() -> None:
    limits = resolve_limits(worker_config(), Cpu(1))
    assert limits == Limits(
        block_size=32, max_num_seqs=128, max_num_batched_tokens=2048, max_model_len=MODEL.max_len
    )


@pytest.mark.parametrize(
    ("given", "seqs", "tokens"),
    [
        ({"max_num_seqs": 4000}, 4000, 4000),
        ({"max_num_batched_tokens": 100}, 100, 100),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 3}, 3, 3),
    ],
)
def test_a_step_holds_a_token_of_every_sequence(given: dict[str, int], seqs: int, tokens: int) -> None:
    limits = resolve_limits(worker_config(**given), Cpu(1))
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (seqs, tokens)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_seqs": 5, "max_num_batched_tokens": 4}, "--max-num-batched-tokens 4 is less than"),
        ({"max_model_len": 513}, "more than the 512 positions"),
        ({"max_model_len": 1}, "--max-model-len must be at least 2, not 1"),
        ({"block_size": 0}, "--block-size must be at least 1, not 0"),
    ],
)
def test_sizes_that_cannot_be(given: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_limits(worker_config(**given), Cpu(1))
