"""The head of a decision model, which lies beside its adapter: it scores the options of a question.

The layout is Kev's. A text ends with its options, each of which ends with the same token, and one token more.
The score of an option is the product of two vectors: one of its last token, and one of the last of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.lora_config import DECISION_HEAD, AdapterError
from models.pooling.task_heads import ACTIVATIONS, TaskHead

_MATRICES = ("k.weight", "q.weight")
_UNKNOWN = {
    "option_isolation": "has options that do not see each other",
    "special_embeddings": "has trained embeddings of its own",
}
"""Fields that change what the model computes, and what it is then."""


def read_decision_head(folder: Path, size: int) -> TaskHead:
    """Read the head for hidden states of this size. Raises AdapterError if it is another one."""
    path = folder / DECISION_HEAD
    try:
        saved: Any = torch.load(path, map_location="cpu", weights_only=True)
        stored = {name: saved["head"][name].float() for name in (*_MATRICES, "k.bias", "q.bias")}
        temperature = float(saved.get("temperature", 1.0))
    except Exception as error:  # torch.load has no error class of its own
        raise AdapterError(
            f"{path} is no head as Kev's decision models have it, with `head` (q and k): {error!r}"
        ) from error
    for field, what in _UNKNOWN.items():
        if saved.get(field):
            raise AdapterError(f"{path}: {field} is set, so this {what}, which is not served")
    keys, queries = (stored[name] for name in _MATRICES)
    width = len(keys)
    fits = keys.shape == queries.shape == (width, size) and stored["k.bias"].shape == stored["q.bias"].shape
    if not fits or stored["k.bias"].shape != (width,):
        raise AdapterError(f"{path}: its matrices are {list(keys.shape)}, and the model's states have {size}")
    if not temperature > 0 or not all(bool(each.isfinite().all()) for each in stored.values()):
        raise AdapterError(f"{path}: its temperature is not above 0, or its numbers are not finite")
    scale = 1 / (math.sqrt(width) * temperature)

    def score(rows: Tensor, is_query: bool) -> Tensor:
        """Rows [options + 1, 2 * width] -> the logit of each option [options, 1]."""
        return (rows[:-1, :width] * rows[-1, width:]).sum(-1, keepdim=True) * scale

    return TaskHead(
        rows=OptionEnds(),
        project=_both(stored, size, width),
        width=2 * width,
        activation=ACTIVATIONS["identity"],
        activates=False,
        reduce=score,
    )


class OptionEnds:
    """The last token of each option, all of which are the one before the last token of the text, and that."""

    needs_all = True

    def needed_positions(self, tokens: Sequence[int], *, query: bool = False) -> Sequence[int]:
        last = len(tokens) - 1
        return [*(at for at in range(last) if tokens[at] == tokens[last - 1]), last]


def _both(stored: dict[str, Tensor], size: int, width: int) -> nn.Linear:
    """What makes both vectors of a row: that of an option, and that with which it is compared."""
    layer = nn.Linear(size, 2 * width, device="meta")
    given = {kind: torch.cat([stored[f"{side}.{kind}"] for side in "kq"]) for kind in ("weight", "bias")}
    layer.load_state_dict(given, assign=True)
    return layer.requires_grad_(False)
