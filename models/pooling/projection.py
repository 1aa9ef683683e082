"""Layers for pooled hidden states: projections to vectors, and classifiers. All are float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.checkpoint.files import open_source
from models.checkpoint.weights import Weights, open_weights
from models.layers.linear import frozen
from models.pooling.sentence_files import Dense, LayerNorm, Normalize, SparseAutoEncoder, Step
from models.quantization.matrices import read_plain_matrix
from models.weight_slices import WeightsError

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
}


class Matrix(nn.Module):
    """A linear layer whose weights are float32 whatever the model's are."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, *, bias: bool | None) -> None:
        """`bias` None means that there is one if the checkpoint has it."""
        super().__init__()
        self.shape = (outputs, inputs)
        self.has_bias = bias

    def pull(self, weights: Weights) -> None:
        self.weight = frozen(read_plain_matrix(weights, self.shape, None, torch.float32))
        has_bias = "bias" in weights if self.has_bias is None else self.has_bias
        self.bias = frozen(weights.take("bias", self.shape[:1], dtype=torch.float32)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Projection(nn.Module):
    """The modules of a sentence-transformers model that follow pooling: rows [K, inputs] -> [K, width].

    Each has its weights in a folder of its own beside the checkpoint.
    """

    def __init__(self, steps: Sequence[Step], inputs: int, folder: Path, load_format: str) -> None:
        super().__init__()
        self.width = inputs
        modules: list[nn.Module] = []
        for step in steps:
            match step:
                case Dense():
                    self._check(step.folder, step.in_features)
                    modules.append(_Dense(step, folder / step.folder, load_format))
                    self.width = step.out_features
                case LayerNorm():
                    self._check(step.folder, step.dimension)
                    modules.append(_LayerNorm(step.dimension, folder / step.folder, load_format))
                case SparseAutoEncoder():
                    self._check(step.folder, step.input_dim)
                    modules.append(_SparseAutoEncoder(step, folder / step.folder, load_format))
                    self.width = step.hidden_dim
                case Normalize():
                    modules.append(_Normalize())
        self.steps = nn.ModuleList(modules)

    def forward(self, rows: Tensor) -> Tensor:
        for step in self.steps:
            rows = step(rows)
        return rows

    def _check(self, name: str, reads: int) -> None:
        if reads != self.width:
            raise WeightsError(f"{name} expects vectors of {reads} numbers, but is given {self.width}")


class FileMatrix(nn.Module):
    """A linear layer in a file of its own beside the checkpoint, as BGE-M3 has them."""

    def __init__(self, path: Path, inputs: int, load_format: str, *, outputs: int | None = None) -> None:
        """`outputs` None leaves their number to the file."""
        super().__init__()
        self.path = path
        self.load_format = load_format
        if outputs is None:
            weight = open_source(path, "auto").tensors.get("weight")
            outputs = weight.shape[0] if weight is not None and weight.shape else inputs
        self.width = outputs
        self.linear = Matrix(inputs, outputs, bias=True)

    def pull(self, weights: Weights) -> None:
        own = _open(self.path, self.load_format, weights)
        self.linear.pull(own)
        own.reading.finish()

    def forward(self, rows: Tensor) -> Tensor:
        return self.linear(rows)


class _Dense(nn.Module):
    def __init__(self, step: Dense, folder: Path, load_format: str) -> None:
        super().__init__()
        self.folder = folder
        self.load_format = load_format
        self.linear = Matrix(step.in_features, step.out_features, bias=step.bias)
        self.activation = _activation(step.activation_function, folder)
        self.adds_input = step.use_residual
        needs_matrix = step.use_residual and step.in_features != step.out_features
        self.residual = (
            Matrix(step.in_features, step.out_features, bias=False) if needs_matrix else nn.Identity()
        )

    def pull(self, weights: Weights) -> None:
        own = _open(self.folder, self.load_format, weights)
        self.linear.pull(own if "weight" in own else own.first("dense", "linear"))
        if isinstance(self.residual, Matrix):
            self.residual.pull(own / "residual")
        own.reading.finish()

    def forward(self, rows: Tensor) -> Tensor:
        projected = self.activation(self.linear(rows))
        return projected + self.residual(rows) if self.adds_input else projected


class _LayerNorm(nn.Module):
    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, size: int, folder: Path, load_format: str) -> None:
        super().__init__()
        self.size = size
        self.folder = folder
        self.load_format = load_format

    def pull(self, weights: Weights) -> None:
        own = _open(self.folder, self.load_format, weights)
        self.weight = frozen(own.take("norm.weight", [self.size]))
        self.bias = frozen(own.take("norm.bias", [self.size]))
        own.reading.finish()

    def forward(self, rows: Tensor) -> Tensor:
        return F.layer_norm(rows, [self.size], self.weight, self.bias)


class _SparseAutoEncoder(nn.Module):
    """Rows [K, input_dim] -> [K, hidden_dim], of which all but the largest numbers are zero."""

    before: nn.Parameter
    behind: nn.Parameter

    def __init__(self, step: SparseAutoEncoder, folder: Path, load_format: str) -> None:
        super().__init__()
        self.step = step
        self.folder = folder
        self.load_format = load_format
        self.encoder = Matrix(step.input_dim, step.hidden_dim, bias=False)

    def pull(self, weights: Weights) -> None:
        own = _open(self.folder, self.load_format, weights)
        self.encoder.pull(own.first("decoder.linear", "encoder"))  # one matrix, saved once
        self.before = frozen(own.take("pre_bias", [self.step.input_dim]))
        self.behind = frozen(own.take("latent_bias", [self.step.hidden_dim]))
        own.ignore("decoder", "stats_last_nonzero")  # for training
        own.reading.finish()

    def forward(self, rows: Tensor) -> Tensor:
        if self.step.normalize:
            rows = rows - rows.mean(-1, keepdim=True)
            rows = rows / (rows.std(-1, keepdim=True) + 1e-5)
        wide = self.encoder(rows - self.before) + self.behind
        largest = wide.topk(self.step.k, dim=-1)
        return torch.zeros_like(wide).scatter_(-1, largest.indices, largest.values.relu())


class _Normalize(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return F.normalize(rows, dim=-1)


def _open(folder: Path, load_format: str, weights: Weights) -> Weights:
    return open_weights(
        folder,
        load_format,
        device=weights.device,
        dtype=torch.float32,
        headers_only=weights.reading.headers_only,
    )


def _activation(path: str, folder: Path) -> Callable[[Tensor], Tensor]:
    """The activation that `path` names as a class of torch.nn, such as torch.nn.modules.activation.Tanh."""
    library, _, name = path.rpartition(".")
    if not library.startswith("torch.nn") or name not in _ACTIVATIONS:
        raise WeightsError(
            f"{folder / 'config.json'}: the activation {path!r} is not supported; "
            f"there are {', '.join(_ACTIVATIONS)} of torch.nn"
        )
    return _ACTIVATIONS[name]
