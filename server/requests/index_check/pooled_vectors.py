"""Vectors of a text from the hidden states of its tokens, in each of the ways that are in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from models.pooling.config import PoolingConfig
from models.pooling.sentence_files import Dense, LayerNorm, Normalize, Step
from server.errors import BadRequest

Floats = NDArray[np.floating]

INNER, POOLER = "MEAN without special tokens", "pooler_output"
"""Ways of others that Facet has no option for: a mean of the text's own tokens, and BERT's extra layer."""


@dataclass(frozen=True)
class Poolings:
    """The ways in which a checkpoint's hidden states may have been pooled."""

    steps: tuple[Step, ...] = ()
    """The modules behind pooling; any number of the first ones may have been applied."""
    modes: tuple[str, ...] = ()
    """The modes of the checkpoint, if it lays several side by side."""
    tensors: Mapping[str, Mapping[str, Floats]] = field(default_factory=dict[str, Mapping[str, Floats]])
    """The weights of the modules, by their folders."""
    pooler: tuple[Floats, Floats] | None = None
    """The weight and the bias of BERT's extra layer, if the checkpoint has one."""

    def merge(self, states: Floats, special: tuple[int, int]) -> dict[str, Floats]:
        """The vectors [H] of hidden states [L, H], by mode. `special` counts special tokens at both ends."""
        first, last = special
        inner = states[first : len(states) - last]
        places = np.arange(1, len(states) + 1, dtype=np.float32)[:, None]
        found = {
            "MEAN": states.mean(axis=0),
            "CLS": states[0],
            "LAST": states[-1],
            "MAX": states.max(axis=0),
            "MEAN_SQRT_LEN": states.sum(axis=0) / len(states) ** 0.5,
            "WEIGHTED_MEAN": (states * places).sum(axis=0) / places.sum(),
        }
        if len(inner) and sum(special):
            found[INNER] = inner.mean(axis=0)
        if self.pooler is not None:
            weight, bias = self.pooler
            found[POOLER] = np.tanh(weight @ states[0] + bias)
        if len(self.modes) > 1:
            found["+".join(self.modes)] = np.concatenate([found[mode] for mode in self.modes])
        return found

    def after(self, rows: Floats, count: int) -> Floats | None:
        """The rows [N, H] behind so many modules; None if these do not take vectors of that width."""
        for step in self.steps[:count]:
            match step:
                case Normalize():
                    rows = normalized(rows)
                case Dense():
                    if rows.shape[1] != step.in_features:
                        return None
                    rows = _dense(rows, step, self.tensors[step.folder])
                case LayerNorm():
                    if rows.shape[1] != step.dimension:
                        return None
                    rows = _layer_norm(rows, self.tensors[step.folder])
        return rows


def read_poolings(folder: Path, pooling: PoolingConfig) -> Poolings:
    """Reads the weights of a checkpoint's modules. Raises BadRequest if index-check cannot compute them."""
    if pooling.token_steps or (pooling.texts.chat is not None):
        raise BadRequest(
            "Vectors of this model cannot be checked: it has modules before pooling, or a chat template "
            "writes its texts."
        )
    tensors: dict[str, Mapping[str, Floats]] = {}
    for step in pooling.steps:
        if isinstance(step, Dense) and step.activation_function.rpartition(".")[2] not in _ACTIVATIONS:
            raise BadRequest(f"The activation {step.activation_function} is not known here.")
        if not isinstance(step, Normalize):
            tensors[step.folder] = _plain_names(folder / step.folder / "model.safetensors")
    return Poolings(pooling.steps, pooling.modes, tensors, _read_pooler(folder))


def normalized(rows: Floats) -> Floats:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths, lengths, 1)


def _gelu(x: Floats) -> Floats:
    # The error function by Abramowitz and Stegun 7.1.26, exact to 1.5e-7.
    z = np.abs(x) / np.sqrt(2.0)
    t = 1 / (1 + 0.3275911 * z)
    series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    return 0.5 * x * (1 + np.sign(x) * (1 - series * np.exp(-z * z)))


_ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": _gelu,
    "SiLU": lambda x: x / (1 + np.exp(-x)),
}


def _dense(rows: Floats, step: Dense, tensors: Mapping[str, Floats]) -> Floats:
    found = rows @ tensors["weight"].T
    if step.bias:
        found = found + tensors["bias"]
    found = _ACTIVATIONS[step.activation_function.rpartition(".")[2]](found)
    if not step.use_residual:
        return found
    return found + (rows @ tensors["residual"].T if "residual" in tensors else rows)


def _layer_norm(rows: Floats, tensors: Mapping[str, Floats]) -> Floats:
    centred = rows - rows.mean(axis=1, keepdims=True)
    return (
        centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * tensors["weight"]
        + tensors["bias"]
    )


def _plain_names(path: Path) -> dict[str, Floats]:
    """The weights of a module in float32, as weight, bias and residual."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError, TypeError) as error:
        raise BadRequest(
            f"The weights of the module {path.parent.name} cannot be read: they must be in "
            "model.safetensors, as float32 or float16."
        ) from error
    return {
        "residual" if name.startswith("residual") else name.rpartition(".")[2]: array.astype(np.float32)
        for name, array in tensors.items()
    }


def _read_pooler(folder: Path) -> tuple[Floats, Floats] | None:
    """BERT's extra layer. A checkpoint in another form than one safetensors file has none for us."""
    path = folder / "model.safetensors"
    if not path.is_file():
        return None
    try:
        with safe_open(path, "numpy") as file:
            names = sorted(
                name for name in [*file.keys()] if name.rpartition(".")[0].endswith("pooler.dense")
            )
            if len(names) != 2:
                return None
            bias, weight = (file.get_tensor(name).astype(np.float32) for name in names)
            return weight, bias
    except (SafetensorError, OSError, TypeError):
        return None


def stacked(merged: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
    """The vectors of several texts [N, H], by mode."""
    return {
        mode: np.stack([one[mode] for one in merged])
        for mode in merged[0]
        if all(mode in one for one in merged)
    }
