"""Memory for the states of hybrids: how many sequences have room, how many states are remembered."""

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from models.layers.state import StateLayer, state_layers
from worker.capacity import CacheBudget, WorkerLimits
from worker.features.states.state_memory import StateMemory, place_bytes, places_for, slots_for

LIMITS = WorkerLimits(block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
BUDGET = CacheBudget(nbytes=2000, flag="--kv-cache-memory-bytes", most=3000)


class Layer(StateLayer):
    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.shapes = shapes

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.shapes

    def input_widths(self) -> tuple[int, ...]:
        return 3, len(self.shapes)

    def read_states(self, inputs: Sequence[Tensor]) -> Tensor:
        return inputs[0]


def allocate(nbytes: int) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_inputs_of_guesses_have_memory_of_their_own() -> None:
    layers = [Layer((3, 5)), Layer((3, 5), (2, 4, 4))]
    memory = StateMemory(layers, 6, allocate, 7, torch.bfloat16)
    kept = [each for layer in layers for each in layer.guesses]
    assert [tuple(each.shape) for each in kept] == [(7, 3), (7, 1), (7, 3), (7, 2)]
    assert memory.nbytes == 6 * place_bytes(layers) + 2 * 7 * 9
    for number, each in enumerate(kept):
        each.fill_(number)
    assert [set(each.flatten().tolist()) for each in kept] == [{0.0}, {1.0}, {2.0}, {3.0}]


def test_layers_are_found_in_a_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Layer((1, 2)))
    assert state_layers(model.modules()) == [model[1]]
    with pytest.raises(RuntimeError, match="before the worker bound them"):
        model[1].bound_states()  # pyright: ignore[reportCallIssue]


def test_slots_are_those_that_half_of_the_memory_holds(caplog: pytest.LogCaptureFixture) -> None:
    assert slots_for(LIMITS, None, 100, BUDGET) == 8
    with caplog.at_level(logging.INFO):
        assert slots_for(LIMITS, None, 200, BUDGET) == 4  # and one that is nobody's
    assert "4 sequences run at a time; raise --kv-cache-memory-bytes" in caplog.text
    with pytest.raises(ValueError, match="or lower --max-num-seqs to 4 at most"):
        slots_for(LIMITS, 8, 200, BUDGET)


def test_a_quarter_of_what_is_left_remembers_states() -> None:
    left = BUDGET.less(400)
    assert (left.nbytes, left.most) == (1600, 2600)
    assert places_for(None, 100, left) == 4
    assert places_for(7, 100, left) == 7
    assert places_for(0, 100, left) == 0
    with pytest.raises(ValueError, match="--state-snapshots 17 needs"):
        places_for(17, 100, left)
