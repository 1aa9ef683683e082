"""The classes that adapters make of a decoder or an encoder, and a model that generates and also pools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drive import Driver, load_ranks
from pooled import NO, PROMPTS, YES, Params, assert_near, causal_checkpoint, load_pooled, packed, pool
from torch import Tensor, nn

from models.checkpoint.weights import load, open_weights
from models.config import read_config
from models.conversion.conversion_choice import Conversion
from models.conversion.pooling_models import convert_class
from models.layers.attention import Attention
from models.model import ModelSetup
from models.pooling.config import TWO_WAY, PoolingConfig
from models.pooling.projection import Matrix
from models.pooling.task_heads import PoolBatch


def converted(
    cls: type, runner: Any = "pooling", convert: Any = "embed", labels_tokens: bool = False
) -> type:
    conversion = Conversion(
        runner=runner, convert=convert, architecture=cls.__name__, labels_tokens=labels_tokens
    )
    return convert_class(cls, conversion)


# Classes


# Encoders


class Encoder(nn.Module):
    """An encoder with the attributes that the pooler reads; a hidden state depends on its token alone."""

    causal = False
    default_pooling = "CLS"
    token_head = False
    head: nn.Module | None

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__()
        self.size = setup.config.hidden_size
        self.head = None

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return torch.outer(ids.float(), torch.arange(1, self.size + 1).float()) / 100

    def attention_layers(self) -> list[Attention]:
        return []


class Classifier(Encoder):
    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(setup)
        self.head = Matrix(self.size, 3, bias=True)


class Tagger(Classifier):
    token_head = True


@pytest.mark.parametrize(
    ("encoder", "tasks"),
    [
        (Encoder, {"embed", "token_embed"}),
        (Classifier, {"classify", "token_classify"}),
        (Tagger, {"token_classify"}),
    ],
)
def test_an_encoder_gets_the_pooler_of_its_head(
    encoder: type[Encoder], tasks: set[str], checkpoints: Path
) -> None:
    config = read_config(causal_checkpoint("LlamaForCausalLM", checkpoints))
    pooling = PoolingConfig(num_labels=3)
    made = converted(encoder, convert="none")
    assert made.__name__ == encoder.__name__
    model = made(ModelSetup(config=config, folder=checkpoints, max_len=8, pooling=pooling))
    load(model, open_weights(checkpoints, "dummy", device=torch.device("cpu"), dtype=torch.float32))
    assert (model.pooler.tasks, model.causal) == (tasks, False)
    task = sorted(tasks)[0]
    ids = torch.tensor([7, 8, 9])
    hidden = model(ids, ids)
    asked = [Params(task, use_activation=False)]
    (answer,) = model.pooler(PoolBatch(hidden, packed([hidden], asked), asked))
    rows = hidden if task.startswith("token") else hidden[:1]  # CLS
    expected = model.base.head(rows) if model.base.head else rows
    torch.testing.assert_close(answer.view_as(expected), expected)


# Generating and pooling with one copy of the weights


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM", "Starcoder2ForCausalLM"])
def test_a_model_that_generates_also_pools(architecture: str, checkpoints: Path) -> None:
    folder = causal_checkpoint(architecture, checkpoints)
    overrides = {"classifier_from_token": [NO, YES], "method": TWO_WAY}
    every = load_pooled(folder, runner="generate", overrides=overrides)
    assert every[0].pooler.tasks == {"embed", "token_embed", "classify", "token_classify"}
    plain = load_ranks(folder)
    assert torch.equal(Driver(every).step({0: PROMPTS[0]})[0], Driver(plain).step({0: PROMPTS[0]})[0])
    assert sum(p.numel() for p in every[0].parameters()) == sum(p.numel() for p in plain[0].parameters())

    params = [Params(), Params("classify"), Params("token_embed"), Params("token_classify")]
    answers = pool(every, [PROMPTS[0]] * 4, params)
    embedder = load_pooled(folder, convert="embed")
    scorer = load_pooled(folder, convert="classify", overrides=overrides)
    alone = [pool(embedder if "embed" in p.task else scorer, [PROMPTS[0]], p)[0] for p in params]
    for answer, expected in zip(answers, alone, strict=True):
        assert_near(answer, expected)


def test_without_labels_it_embeds_only(checkpoints: Path) -> None:
    model = load_pooled(causal_checkpoint("Qwen3ForCausalLM", checkpoints), runner="generate")
    assert model[0].pooler.tasks == {"embed", "token_embed"}
    assert model[0].causal
