"""Layers that keep a state of fixed size for a sequence, in place of keys and values for each token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor, nn

from models import ops
from models.context import context
from models.parallel.parallel import Parallel


class StateLayer(nn.Module, ABC):
    """A layer whose states of all sequences the worker makes, and binds. They are float32."""

    states: Sequence[Tensor] = ()
    """For each of `state_shapes`, the tensor [places, *shape] of all sequences."""
    guesses: Sequence[Tensor] = ()
    """For each of `input_widths`, the tensor [guesses, width] where inputs of a step's guesses are kept;
    nothing if there are none."""

    @abstractmethod
    def state_shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of what this layer keeps of one sequence, as far as this rank holds it."""
        ...

    @abstractmethod
    def input_widths(self) -> Sequence[int]:
        """The widths of what `read_states` takes of a token."""
        ...

    @abstractmethod
    def read_states(self, inputs: Sequence[Tensor]) -> Tensor:
        """Let states go on by the tokens of the step, of each of which they are read -> [T, width].

        inputs: a tensor [T, width] for each of `input_widths`.
        """
        ...

    def keep_guesses(self, inputs: Sequence[Tensor]) -> None:
        """Keep what `read_states` takes of guesses: by those that hold, states go on when that is known."""
        step = context()
        if self.guesses and step.states is not None and step.states.guessed:
            for x, kept in zip(inputs, self.guesses, strict=True):
                ops.keep_guesses(x, kept, step)

    def bound_states(self) -> Sequence[Tensor]:
        if not self.states:
            raise RuntimeError("a layer with states ran before the worker bound them")
        return self.states


class StateSpec(Protocol):
    """The sizes of a layer with states."""

    def build(self, hidden_size: int, parallel: Parallel) -> StateLayer:
        """Make the layer of this rank: hidden states [T, hidden_size] -> [T, hidden_size]."""
        ...


def state_layers(modules: Iterable[nn.Module]) -> list[StateLayer]:
    """The layers with states among modules."""
    return [module for module in modules if isinstance(module, StateLayer)]
