"""Layers for which there are no kernels for CUDA. A model with one is refused before its weights are read."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from models.layers.delta import ChannelDelta
from models.layers.latent_attention import TokenIndexer
from models.layers.mamba import ChannelScan


class Unsupported(ValueError):
    """The model runs on CPUs only so far. The message says which of its layers is the reason."""


_REASONS = {
    ChannelDelta: "Kimi delta attention",
    ChannelScan: "the scan of the first Mamba (Mamba, Falcon Mamba, Jamba)",
    TokenIndexer: "the indexer that chooses what attention reads (DeepSeek-V3.2, GLM-5)",
}


def refuse_unsupported(modules: Iterable[nn.Module]) -> None:
    """Raise `Unsupported` for the first layer without kernels."""
    for module in modules:
        if reason := _REASONS.get(type(module)):
            raise Unsupported(
                f"the model runs on CPUs only so far: there are no kernels for CUDA of {reason}; "
                "pass --device cpu"
            )
