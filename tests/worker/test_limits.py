"""The sizes that a worker runs with, and those that contradict each other."""

from dataclasses import replace
from typing import get_type_hints

import pytest
from msgspec import structs
from sizes import MODEL, worker_config

from models.conversion.conversion_choice import Conversion
from models.pooling.config import PoolingConfig
from models.pooling.text_files import TextFacts
from models.quantization.config import MADE_ON_LOADING, METHODS
from worker.capacity import WorkerLimits
from worker.devices.cpu import Cpu
from worker.limits import fit_whole_sequences, resolve_limits, take_less
from worker.options import OptionDoc, WorkerOptions


def test_sizes_by_default() -> None:
    limits = resolve_limits(worker_config(), Cpu(1))
    assert limits == WorkerLimits(
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


@pytest.mark.parametrize(
    ("kills", "given", "whole", "tokens"),
    [
        (0, {}, False, 2048),
        (1, {}, False, 512),
        (3, {}, False, 128),
        (3, {"max_num_seqs": 2}, False, 64),
        (3, {"max_num_batched_tokens": 20}, False, 20),
        (1, {"max_num_seqs": 2, "max_model_len": 300}, True, 512),
        (3, {"max_num_seqs": 2, "max_model_len": 300}, True, 300),
        (3, {"max_model_len": 100}, True, 128),
    ],
)
def test_a_worker_in_the_place_of_killed_ones_takes_less(
    kills: int,
    given: dict[str, int],
    whole: bool,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The other rank had twice as many kills as this one says: all take the same."""
    monkeypatch.setattr("worker.limits.times_killed", lambda folder, name: kills // 2)
    config = worker_config(**given)
    found = take_less(resolve_limits(config, Cpu(1)), config, lambda own: min(own, -kills), whole=whole)
    assert (found.max_num_batched_tokens, found.kills) == (tokens, kills)
    assert (f"memory ran out: {kills}; it takes less: {tokens} tokens in a step" in caplog.text) == bool(
        kills
    )


def test_a_model_that_pools_has_other_sizes() -> None:
    model = worker_config().model
    pooling = Conversion(runner="pooling", convert="embed", architecture=model.architecture)
    trained = PoolingConfig(texts=TextFacts(max_len=100))
    assert resolve_limits(worker_config(conversion=pooling), Cpu(1)) == WorkerLimits(
        32, 256, 4096, model.max_len
    )
    assert resolve_limits(worker_config(conversion=pooling, pooling=trained), Cpu(1)).max_model_len == 100
    asked = worker_config(conversion=pooling, pooling=trained, max_model_len=200)
    assert resolve_limits(asked, Cpu(1)).max_model_len == 200
    assert resolve_limits(worker_config(pooling=trained), Cpu(1)).max_model_len == model.max_len


def test_a_step_makes_room_for_the_longest_text_unless_the_operator_forbids() -> None:
    limits = WorkerLimits(block_size=32, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=500)
    assert fit_whole_sequences(limits, worker_config()) == replace(limits, max_num_batched_tokens=500)
    roomy = replace(limits, max_num_batched_tokens=600)
    assert fit_whole_sequences(roomy, worker_config(max_num_batched_tokens=600)) == roomy
    with pytest.raises(ValueError, match=r"64 is less than --max-model-len \(500\)"):
        fit_whole_sequences(limits, worker_config(max_num_batched_tokens=64))


def test_states_hold_texts_of_any_length() -> None:
    model = structs.replace(MODEL, any_length=True)
    unlimited = worker_config(max_model_len=100_000, model=model)
    assert resolve_limits(unlimited, Cpu(1)).max_model_len == 100_000


# What options take.


def test_every_method_of_checkpoints_can_be_named() -> None:
    hint = get_type_hints(WorkerOptions, include_extras=True)["quantization"]
    (doc,) = [entry for entry in hint.__metadata__ if isinstance(entry, OptionDoc)]
    assert {*METHODS, *MADE_ON_LOADING} <= set(doc.choices)


@pytest.mark.parametrize(("seqs", "tokens", "rows"), [(1, 2048, 64), (100, 2048, 100), (4, 32, 32)])
def test_guesses_have_room_in_small_steps(seqs: int, tokens: int, rows: int) -> None:
    limits = WorkerLimits(32, seqs, tokens, 100)
    assert limits.most_rows == rows
    assert limits.staged_words >= 4 * (tokens + 8 * rows)
