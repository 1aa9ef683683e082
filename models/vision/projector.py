"""What stands between a tower and a text: squares of rows become one row, which has the text's width."""

from __future__ import annotations

from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.layers.linear import Linear
from models.layers.mlp import activation_kind


class Projector(nn.Module):
    """Two linear layers with an activation between."""

    def __init__(self, inputs: int, size: int, *, activation: str, bias: bool) -> None:
        super().__init__()
        self.inner = Linear(inputs, size, bias=bias, activation=activation_kind(activation))
        self.outer = Linear(size, size, bias=bias)

    def pull(self, weights: Weights) -> None:
        load(self.inner, weights / "linear_1")
        load(self.outer, weights / "linear_2")

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


def merge_squares(x: Tensor, rows: int, columns: int, side: int) -> Tensor:
    """Lay the rows of x [N * rows * columns, size] that form squares side by side, row by row of a square:
    [N * rows * columns / side**2, side**2 * size]."""
    cut = x.view(-1, rows // side, side, columns // side, side, x.shape[-1])
    return cut.transpose(2, 3).reshape(-1, side * side * x.shape[-1])
