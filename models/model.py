"""What a model is told when it is built, and what every model must be able to do for the worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from models.config import ModelConfig
from models.layers.attention import Attention
from models.parallel import Parallel


@dataclass(frozen=True, kw_only=True)
class ModelSetup:
    config: ModelConfig
    folder: Path
    """The checkpoint. The families here need its config only; the transformers fallback reads more."""
    max_len: int
    """The longest sequence that will be served: some rope kinds choose their frequencies by it."""
    parallel: Parallel = field(default_factory=Parallel)
    trust_remote_code: bool = False


class CausalLM(Protocol):
    """A model's class is called with a ModelSetup, then filled by `models.weights.load`."""

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Tokens of the step [T], packed as the ForwardContext says, -> hidden states [T, hidden_size].

        Must run under `use_context`, with the cache bound to every attention layer.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of any R tokens [R, hidden_size] -> [R, vocab_size] float32."""
        ...

    def attention_layers(self) -> list[Attention]:
        """In the order of the layers. The worker sizes the cache by them and binds their `kv`."""
        ...

    def parameters(self) -> Iterator[Tensor]:
        """All tensors that were loaded, tied ones once."""
        ...
