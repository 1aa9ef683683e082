"""The name by which clients call a model to which its operator gave none."""

from __future__ import annotations

import os
import re

_HUB_ID = re.compile(r"((hf|huggingface)\.co/(?=[^/]+/))?(\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?)")
_GGUF = re.compile(r"(.+?)(-\d{5}-of-\d{5})?\.gguf")
_CACHED = re.compile(r"models--(.+)")
"""A model's folder in the cache of Hugging Face's hub, which names its owner and the model."""


def shown_name(model: str) -> str:
    """Names a model whose operator gave it none: clients must not learn where files lie.

    A hub id as it is, and of a path only its last part, without .gguf.
    """
    file = _GGUF.fullmatch(os.path.basename(model))
    if (hub := _HUB_ID.fullmatch(model)) and not file:
        return hub[3]
    parts = os.path.abspath(os.path.expanduser(model)).split(os.sep)
    for part in parts:
        if cached := _CACHED.fullmatch(part):
            return cached[1].replace("--", "/")
    return (file[1] if file else parts[-1]) or "model"
