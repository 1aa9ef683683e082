"""What a model is told when it is built, and what every model must be able to do for the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from models.config import ModelConfig
from models.layers.attention import Attention
from models.parallel.parallel import Parallel
from models.pooling.config import PoolingConfig
from models.pooling.pooler import Pooler


@dataclass(frozen=True, kw_only=True)
class ModelSetup:
    config: ModelConfig
    folder: Path
    """The checkpoint. The families here need its config only; the transformers fallback reads more."""
    max_len: int
    """The longest sequence that will be served: some rope kinds choose their frequencies by it."""
    parallel: Parallel = field(default_factory=Parallel)
    trust_remote_code: bool = False
    load_format: str = "auto"
    """Of weights that lie beside the checkpoint's own, such as the projections of an embedding model."""
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    head_tokens: tuple[int, ...] | None = None
    """The tokens that the LM head must know; None: all. Without any, a generating class has no LM head."""


Forward = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""The type of a model's `forward`: ids, positions, the stream of an earlier stage -> hidden states."""


class CausalLM(Protocol):
    """A model's class is called with a ModelSetup, then filled by `models.checkpoint.weights.load`."""

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        """Tokens of the step [T], packed as the ForwardContext says, -> hidden states [T, output_size].

        Must run under `use_context`, with the cache bound to every attention layer. Where the layers are cut
        into stages, each gives the residual stream [T, hidden_size] that the next one takes in place of ids.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of any R tokens [R, output_size] -> [R, vocab_size] float32."""
        ...

    def attention_layers(self) -> list[Attention]:
        """Those of this stage, in order. The worker sizes the cache by them and binds their `kv`."""
        ...

    def parameters(self) -> Iterator[Tensor]:
        """All tensors that were loaded, tied ones once."""
        ...


class ServedModel(CausalLM, Protocol):
    """What a conversion may give: `logits` if its runner generates, `pooler` if it pools."""

    causal: bool
    """False: tokens see what follows them, so a sequence is computed whole; there is no cache to bind."""
    pooler: Pooler
