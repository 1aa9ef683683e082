"""The contract between a model and the worker: what a model is built from, and which methods it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.layers.attention import CachedAttention
from models.parallel.parallel import Parallel
from models.pooling.config import PoolingConfig
from models.pooling.task_heads import Pooler


@dataclass(frozen=True, kw_only=True)
class ModelSetup:
    """The one argument of a model's class."""

    config: ModelConfig
    folder: Path
    """The checkpoint's folder. Our own families need its config only, the transformers fallback more."""
    max_len: int
    """The length of the longest sequence that will be served: some kinds of rope choose frequencies by it."""
    parallel: Parallel = field(default_factory=Parallel)
    dtype: torch.dtype = torch.float32
    """The type of numbers in which the model computes."""
    trust_remote_code: bool = False
    load_format: str = "auto"
    """The format of weights in folders of their own, such as the projections of an embedding model."""
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    target: ServedModel | None = None
    """The model for which a drafter guesses that reads its hidden states; None: it is none."""
    head_tokens: tuple[int, ...] | None = None
    """The tokens whose logits are needed; None means all, and () that the model has no LM head at all."""


Forward = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""The type of a model's `forward`: ids, positions, the stream of an earlier stage -> hidden states."""


def stream_size(model: object, hidden_size: int) -> int:
    """The numbers of a token that a stage hands on: the hidden size, unless the model says another."""
    return getattr(model, "stream_size", hidden_size)


class CausalLM(Protocol):
    """A model that generates: its class is called with a ModelSetup, then `weights.load` fills it."""

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        """Tokens of the step [T], packed as the ForwardContext says, -> hidden states [T, output_size].

        Must run under `use_context`, with the cache bound to every attention layer. Where the layers are cut
        into stages, each gives the residual stream [T, hidden_size] that the next one takes in place of ids,
        or as many numbers for each token as the model's `stream_size` says.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of any R tokens [R, output_size] -> [R, vocab_size] float32."""
        ...

    def attention_layers(self) -> Sequence[CachedAttention]:
        """The attention layers of this stage, in order: the worker makes their caches and binds `kv`."""
        ...

    def parameters(self) -> Iterator[Tensor]:
        """All tensors that were loaded; tied ones come once."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """All parts of the model, in the order in which a step computes them."""
        ...


class ServedModel(CausalLM, Protocol):
    """A model as it is served: `logits` is there if its runner generates, and `pooler` if it pools."""

    causal: bool
    """False if tokens see what follows them: a sequence is then computed whole, and has no cache to bind."""
    pooler: Pooler
