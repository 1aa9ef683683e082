"""Reward models: a decoder's trunk with a small head of its own that judges every token.

Each token has one value, and the last is that of the whole text. A process reward model has two labels at
each token that ends a step of reasoning instead.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.conversion.pooling_models import PoolingModel
from models.conversion.task_poolers import label_pooler
from models.families.decoders.llama import InternLM2ForCausalLM, Qwen2ForCausalLM
from models.layers.stages import if_held
from models.model import ModelSetup
from models.pooling.projection import Matrix

_STEP_END = 151651  # <extra_0> in the vocabulary of Qwen2


class InternLM2ForRewardModel(PoolingModel):
    base_class = InternLM2ForCausalLM

    def __init__(self, setup: ModelSetup) -> None:
        setup = _with_labels(setup, 1)
        super().__init__(setup)
        self.v_head = if_held(self.last, Matrix(setup.config.hidden_size, 1, bias=False))
        self.pooler = label_pooler(setup, self.v_head, "LAST", for_texts=False, activates=False)

    def pull(self, weights: Weights) -> None:
        super().pull(weights)
        load(self.v_head, weights / "v_head")


class _Qwen2Reward(PoolingModel):
    base_class = Qwen2ForCausalLM

    def __init__(self, setup: ModelSetup, *, labels: int, activates: bool, tag: int | None) -> None:
        setup = _with_labels(setup, labels)
        super().__init__(setup)
        self.score = if_held(self.last, _RewardHead(setup.config.hidden_size, labels))
        self.pooler = label_pooler(setup, self.score, "LAST", for_texts=False, activates=activates, tag=tag)

    def pull(self, weights: Weights) -> None:
        super().pull(weights)
        load(self.score, weights / "score")


class Qwen2ForRewardModel(_Qwen2Reward):
    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(setup, labels=1, activates=False, tag=None)


class Qwen2ForProcessRewardModel(_Qwen2Reward):
    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(setup, labels=2, activates=True, tag=_STEP_END)


class _RewardHead(nn.Module):
    """Two matrices: rows [K, H] float32 -> [K, labels]."""

    def __init__(self, size: int, labels: int) -> None:
        super().__init__()
        self.inner = Matrix(size, size, bias=True)
        self.outer = Matrix(size, labels, bias=True)

    def pull(self, weights: Weights) -> None:
        load(self.inner, weights / "0")
        load(self.outer, weights / "2")

    def forward(self, rows: Tensor) -> Tensor:
        return self.outer(self.inner(rows).relu())


def _with_labels(setup: ModelSetup, labels: int) -> ModelSetup:
    """The setup without an LM head, and with the number of labels, which config.json does not say."""
    activation = "softmax" if labels > 1 else "sigmoid"
    pooling = msgspec.structs.replace(setup.pooling, num_labels=labels, labels=(), activation=activation)
    return replace(setup, head_tokens=(), pooling=pooling)
