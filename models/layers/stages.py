"""Modules of which a pipeline stage holds a part: its run of the layers, and nothing of other stages'."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.parallel.parallel import Parallel


class Layers(nn.ModuleList):
    """This stage's run of `count` layers. The checkpoint has them under their numbers in the whole model.

    `together`: the last layers that one stage must hold.
    """

    elsewhere: Sequence[str] = ()
    """The scopes of the checkpoint that hold the layers of other stages."""

    def __init__(
        self, count: int, parallel: Parallel, build: Callable[[int], nn.Module], together: int = 1
    ) -> None:
        self.count = count
        self.numbers = parallel.share_layers(count, together)
        self.others = [str(number) for number in range(count) if number not in self.numbers]
        super().__init__(build(number) for number in self.numbers)

    def pull(self, weights: Weights) -> None:
        weights.ignore(*self.others)
        self.elsewhere = [(weights / number).path for number in self.others]
        for number, layer in zip(self.numbers, self, strict=True):
            load(layer, weights / str(number))


def if_held(here: bool, module: nn.Module) -> nn.Module:
    """The module, if this stage holds it, else a `NotHere`."""
    return module if here else NotHere()


class NotHere(nn.Module):
    """A stand-in for a module that another stage holds. Its tensors are left to that stage."""

    def pull(self, weights: Weights) -> None:
        weights.ignore("")

    def forward(self, stream: Tensor) -> Tensor:
        return stream
