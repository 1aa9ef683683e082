"""What a stage holds of a model: its run of the layers, and nothing of what other stages hold."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.parallel.parallel import Parallel


class Layers(nn.ModuleList):
    """Of `count` layers those of this stage, which the checkpoint has under their numbers in the whole."""

    def __init__(self, count: int, parallel: Parallel, build: Callable[[int], nn.Module]) -> None:
        self.numbers = parallel.share_layers(count)
        self.others = [str(number) for number in range(count) if number not in self.numbers]
        super().__init__(build(number) for number in self.numbers)

    def pull(self, weights: Weights) -> None:
        weights.ignore(*self.others)
        for number, layer in zip(self.numbers, self, strict=True):
            load(layer, weights / str(number))


def if_held(here: bool, module: nn.Module) -> nn.Module:
    """What one stage alone holds: all others have nothing in its place."""
    return module if here else NotHere()


class NotHere(nn.Module):
    """Stands where another stage has something. What the checkpoint has for it is left to that stage."""

    def pull(self, weights: Weights) -> None:
        weights.ignore("")

    def forward(self, stream: Tensor) -> Tensor:
        return stream
