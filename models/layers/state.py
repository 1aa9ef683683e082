"""Layers that keep a state of fixed size for a sequence, in place of keys and values for each token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from models.parallel.parallel import Parallel


class StateLayer(nn.Module, ABC):
    """A layer whose states of all sequences the worker makes, and binds. They are float32."""

    states: Sequence[Tensor] = ()
    """For each of `state_shapes`, the tensor [places, *shape] of all sequences."""

    @abstractmethod
    def state_shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of what this layer keeps of one sequence, as far as this rank holds it."""
        ...

    def bound_states(self) -> Sequence[Tensor]:
        if not self.states:
            raise RuntimeError("a layer with states ran before the worker bound them")
        return self.states


class StateSpec(Protocol):
    """The sizes of a layer with states."""

    def build(self, hidden_size: int, parallel: Parallel) -> StateLayer:
        """Make the layer of this rank: hidden states [T, hidden_size] -> [T, hidden_size]."""
        ...
