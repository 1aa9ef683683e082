"""Layers for multi-token prediction (MTP), which some checkpoints carry beside the model to draft tokens.

Serving without drafts does not need them, so they are left unread. They are recognised by name: Qwen3-Next
and MiMo call them `mtp` or `mtp_layers`; DeepSeek, GLM and Step number them on after the last layer of the
model, and config.json says how many there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from models.checkpoint.weights import Weights
from models.config import ModelConfig

_NAMED = re.compile(r"(?:.+?\.)?mtp(?:_\w+)?(?=\.)")
_NUMBERED = re.compile(r"(?:.+?\.)?layers\.(\d+)(?=\.)")


def ignore_mtp(weights: Weights, config: ModelConfig) -> list[str]:
    """Leave these layers unread, and return the scopes in which they lie, such as "model.layers.61"."""
    scopes = sorted(set(_scopes(weights.reading.names, config)))
    weights.ignore(*scopes)
    return scopes


def _scopes(names: Iterable[str], config: ModelConfig) -> Iterator[str]:
    count = config.raw.get("num_nextn_predict_layers")
    extra = range(config.num_layers, config.num_layers + count if isinstance(count, int) else 0)
    for name in names:
        if named := _NAMED.match(name):
            yield named[0]
        elif (numbered := _NUMBERED.match(name)) and int(numbered[1]) in extra:
            yield numbered[0]
