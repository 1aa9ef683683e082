"""The pooler by itself on random hidden states, compared with sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from later import Later
from pooled import Params, packed
from torch import Tensor

from models import ops
from models.checkpoint.weights import load, open_weights
from models.config import ConfigError, ModelConfig
from models.conversion.task_poolers import embedding_pooler, label_pooler
from models.model import ModelSetup
from models.pooling.config import Activation, PoolingConfig
from models.pooling.sentence_files import Dense, LayerNorm, Mode, Normalize
from models.pooling.task_heads import PoolBatch, Pooler
from models.weight_slices import WeightsError

THEIRS = Later("sentence_transformers.sentence_transformer.modules")
SIZE = 48
LENGTHS = [5, 1, 9, 3, 7]
THEIR_NAMES: dict[Mode, str] = {
    "CLS": "cls",
    "LAST": "lasttoken",
    "MEAN": "mean",
    "MAX": "max",
    "MEAN_SQRT_LEN": "mean_sqrt_len_tokens",
    "WEIGHTED_MEAN": "weightedmean",
}


def setup(
    pooling: PoolingConfig,
    folder: Path = Path("nowhere"),
    hidden_size: int = SIZE,
    load_format: str = "auto",
) -> ModelSetup:
    config = ModelConfig(
        architecture="AnyForCausalLM",
        architectures=("AnyForCausalLM",),
        dtype="float32",
        vocab_size=100,
        hidden_size=hidden_size,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=hidden_size,
        max_len=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_ids=(),
        raw={},
    )
    return ModelSetup(config=config, folder=folder, max_len=512, pooling=pooling, load_format=load_format)


def embedder(hidden_size: int = SIZE, **fields: Any) -> Pooler:
    """A pooler with made-up projections."""
    nowhere = Path("nowhere")
    pooler = embedding_pooler(setup(PoolingConfig(**fields), nowhere, hidden_size, "dummy"), "LAST")
    load(pooler, open_weights(nowhere, "dummy", device=torch.device("cpu"), dtype=torch.float32))
    return pooler


@pytest.fixture(scope="module")
def hidden() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, SIZE, generator=generator) for length in LENGTHS]


def pool(
    pooler: Pooler, hidden: list[Tensor], params: list[Params], ids: list[int] | None = None
) -> list[Tensor]:
    tokens = iter(ids or range(sum(map(len, hidden))))
    texts = [[*islice(tokens, len(rows))] for rows in hidden]
    needed = [
        rows[[*pooler.needed_positions(asked, text)]]
        for rows, asked, text in zip(hidden, params, texts, strict=True)
    ]
    with torch.inference_mode():
        return pooler(PoolBatch(torch.cat(needed), packed(needed, params), params))


def theirs(hidden: list[Tensor], modes: list[Mode], skip: int = 0) -> Tensor:
    """The vectors [R, D] that sentence-transformers computes for the same, as a padded batch."""
    module = THEIRS.Pooling(SIZE, [THEIR_NAMES[mode] for mode in modes], include_prompt=not skip)
    longest = max(len(rows) for rows in hidden)
    padded = torch.full((len(hidden), longest, SIZE), 7.0)
    mask = torch.zeros(len(hidden), longest, dtype=torch.int64)
    for index, rows in enumerate(hidden):
        padded[index, : len(rows)] = rows
        mask[index, : len(rows)] = 1
    features = {"token_embeddings": padded, "attention_mask": mask, "prompt_length": skip}
    return module(features)["sentence_embedding"]


# Choices of tokens


@pytest.mark.parametrize("mode", list(THEIR_NAMES))
def test_every_mode_is_sentence_transformers(hidden: list[Tensor], mode: Mode) -> None:
    vectors = pool(embedder(modes=(mode,), normalize=False), hidden, [Params()] * len(hidden))
    torch.testing.assert_close(torch.stack(vectors), theirs(hidden, [mode]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("mode", list(THEIR_NAMES))
def test_an_instruction_is_left_out(hidden: list[Tensor], mode: Mode) -> None:
    longer = [rows for rows in hidden if len(rows) > 2]
    vectors = pool(embedder(modes=(mode,), normalize=False), longer, [Params(skip=2)] * len(longer))
    torch.testing.assert_close(torch.stack(vectors), theirs(longer, [mode], skip=2), atol=1e-6, rtol=0)


def test_nothing_but_an_instruction_is_pooled_whole(hidden: list[Tensor]) -> None:
    pooler = embedder(modes=("MEAN",))
    with_skip, without = pool(pooler, [hidden[1]] * 2, [Params(skip=4), Params()])
    assert torch.equal(with_skip, without)
    assert with_skip.isfinite().all()


def test_without_a_word_the_family_decides(hidden: list[Tensor]) -> None:
    assert not embedder().needs_all_rows(Params())
    assert embedding_pooler(setup(PoolingConfig()), "CLS").needs_all_rows(Params())


def test_steps_need_a_tag() -> None:
    with pytest.raises(ConfigError, match="step_tag_id"):
        label_pooler(setup(PoolingConfig(tokens="STEP")), lambda rows: rows, "LAST")


# Projections


def test_projections_are_sentence_transformers(hidden: list[Tensor], tmp_path: Path) -> None:
    torch.manual_seed(0)
    dense = THEIRS.Dense(SIZE, 32, activation_function=torch.nn.GELU())
    residual = THEIRS.Dense(32, 20, bias=False, use_residual=True)
    norm = THEIRS.LayerNorm(20)
    torch.nn.init.normal_(norm.norm.weight)
    torch.nn.init.normal_(norm.norm.bias)
    for module, name in ((dense, "2_Dense"), (residual, "3_Dense"), (norm, "4_LayerNorm")):
        (tmp_path / name).mkdir()
        module.save(str(tmp_path / name))
    steps = (
        Dense(
            folder="2_Dense",
            in_features=SIZE,
            out_features=32,
            activation_function="torch.nn.modules.activation.GELU",
        ),
        Normalize(),
        Dense(folder="3_Dense", in_features=32, out_features=20, bias=False, use_residual=True),
        LayerNorm(folder="4_LayerNorm", dimension=20),
    )
    pooler = embedding_pooler(setup(PoolingConfig(modes=("MEAN",), steps=steps), tmp_path), "LAST")
    load(pooler, open_weights(tmp_path / "2_Dense", device=torch.device("cpu"), dtype=torch.bfloat16))

    features = {"sentence_embedding": theirs(hidden, ["MEAN"])}
    features["sentence_embedding"] = torch.nn.functional.normalize(dense(features)["sentence_embedding"])
    expected = torch.nn.functional.normalize(norm(residual(features))["sentence_embedding"])
    vectors = pool(pooler, hidden, [Params()] * len(hidden))
    assert pooler.width(Params()) == 20
    torch.testing.assert_close(torch.stack(vectors), expected.detach(), atol=1e-6, rtol=0)
    for rows, vectors in zip(
        hidden, pool(pooler, hidden, [Params("token_embed")] * len(hidden)), strict=True
    ):
        assert vectors.shape == (len(rows), 20)


def test_projections_that_do_not_fit() -> None:
    with pytest.raises(WeightsError, match="2_Dense expects vectors of 47 numbers, but is given 48"):
        embedder(steps=(Dense(folder="2_Dense", in_features=47, out_features=8),))
    with pytest.raises(
        WeightsError, match=r"activation 'my\.Own' is not supported; there are Identity, Tanh"
    ):
        embedder(
            steps=(Dense(folder="2_Dense", in_features=SIZE, out_features=8, activation_function="my.Own"),)
        )


def test_a_projection_before_pooling_sees_each_token(hidden: list[Tensor]) -> None:
    dense = Dense(
        folder="1_Dense", in_features=SIZE, out_features=8
    )  # with Tanh, which does not commute with a mean
    pooler = embedder(modes=("MEAN",), token_steps=(dense,), normalize=False)
    text, tokens = pool(pooler, [hidden[2]] * 2, [Params(), Params("token_embed")])
    assert tokens.shape == (LENGTHS[2], 8)
    torch.testing.assert_close(text, tokens.mean(0))


def test_rows_without_a_projection_are_not_copied(hidden: list[Tensor]) -> None:
    """A step's hidden states are many: each copy of all would take as long as a layer."""
    projected: list[int] = []

    def apart(function: Callable[[Tensor], Tensor], rows: Tensor, lengths: Sequence[int]) -> Tensor:
        projected.append(len(rows))
        return function(rows)

    params = [Params("embed"), *[Params("token_embed")] * (len(hidden) - 1)]
    dense = Dense(folder="2_Dense", in_features=SIZE, out_features=8)
    ops.use({"apart": apart})
    try:
        pool(embedder(modes=("MEAN",)), hidden, params)
        assert not projected
        pool(embedder(modes=("MEAN",), steps=(dense,)), hidden, params)
        assert projected == [1, sum(LENGTHS[1:])]
    finally:
        ops.use({})


# Activations


def test_vectors_are_cut_before_they_are_normalised(hidden: list[Tensor]) -> None:
    pooler = embedder(modes=("MEAN",))
    short, raw, usual = pool(
        pooler,
        hidden[2:3] * 3,
        [Params(dimensions=10), Params(dimensions=10, use_activation=False), Params()],
    )
    mean = hidden[2].mean(0)
    torch.testing.assert_close(raw, mean[:10])
    torch.testing.assert_close(short, mean[:10] / mean[:10].norm())
    torch.testing.assert_close(usual, mean / mean.norm())
    assert pooler.width(Params(dimensions=10)) == 10
    assert pooler.width(Params(dimensions=1000)) == SIZE


def test_defaults_of_the_checkpoint(hidden: list[Tensor]) -> None:
    raw = embedder(modes=("LAST",), normalize=False, dimensions=7)
    plain, asked = pool(raw, hidden[:1] * 2, [Params(), Params(use_activation=True)])
    assert torch.equal(plain, hidden[0][-1, :7])
    torch.testing.assert_close(asked.norm(), torch.tensor(1.0))
    operator = embedder(modes=("LAST",), normalize=False, use_activation=True)
    torch.testing.assert_close(pool(operator, hidden[:1], [Params()])[0].norm(), torch.tensor(1.0))


@pytest.mark.parametrize("activation", ["identity", "sigmoid", "softmax"])
def test_labels(hidden: list[Tensor], activation: Activation) -> None:
    weight = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1))
    pooling = PoolingConfig(
        modes=("MEAN",),
        num_labels=3,
        activation=activation,
        logit_mean=0.5,
        logit_sigma=2.0,
    )
    pooler = label_pooler(setup(pooling), lambda rows: rows @ weight.T, "LAST")
    assert pooler.tasks == {"classify", "token_classify"}
    scores, raw, tokens = pool(
        pooler,
        hidden[:1] * 3,
        [Params("classify"), Params("classify", use_activation=False), Params("token_classify")],
    )
    logits = (hidden[0].mean(0) @ weight.T - 0.5) / 2
    functions = {"identity": torch.clone, "sigmoid": torch.sigmoid, "softmax": lambda x: x.softmax(-1)}
    torch.testing.assert_close(raw, logits)
    torch.testing.assert_close(scores, functions[activation](logits))
    torch.testing.assert_close(tokens, functions[activation]((hidden[0] @ weight.T - 0.5) / 2))


def test_a_head_for_tokens_only() -> None:
    pooler = label_pooler(setup(PoolingConfig()), lambda rows: rows, "LAST", for_texts=False)
    assert pooler.tasks == {"token_classify"}


def test_a_classifier_reads_one_row() -> None:
    with pytest.raises(ConfigError, match="not CLS and MEAN side by side"):
        label_pooler(setup(PoolingConfig(modes=("CLS", "MEAN"))), lambda rows: rows, "LAST")


# Batches


def test_a_task_that_is_not_there(hidden: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="no task 'classify'; it has embed, token_embed"):
        pool(embedder(), hidden[:1], [Params("classify")])


@pytest.mark.parametrize("labels", [1, 3, 40])
@pytest.mark.parametrize("activation", ["identity", "sigmoid", "softmax"])
def test_company_changes_no_bit_of_a_label(activation: Activation, labels: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(labels, 384, generator=generator)
    texts = [torch.randn(1 + index % 5, 384, generator=generator) for index in range(37)]
    pooling = PoolingConfig(num_labels=labels, activation=activation)
    pooler = label_pooler(setup(pooling), lambda rows: torch.nn.functional.linear(rows, weight), "LAST")
    for task in ("classify", "token_classify"):
        together = pool(pooler, texts, [Params(task)] * len(texts))
        for text, scores in zip(texts, together, strict=True):
            assert torch.equal(pool(pooler, [text], [Params(task)])[0], scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("task", ["embed", "token_embed"])
@pytest.mark.parametrize("mode", list(THEIR_NAMES))
def test_company_changes_no_bit(mode: Mode, task: str, dtype: torch.dtype) -> None:
    """The sizes are such that sums are vectorised and spread over threads, and matrix products blocked."""
    size = 384
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randn(n, size, generator=generator).to(dtype) for n in (1, 300, 2, 17, 129, 64, 3, 250)]
    steps = (Dense(folder="2_Dense", in_features=size, out_features=256),)
    pooler = embedder(hidden_size=size, modes=(mode,), steps=steps)
    together = pool(pooler, texts, [Params(task)] * len(texts))
    for text, vector in zip(texts, together, strict=True):
        assert torch.equal(pool(pooler, [text], [Params(task)])[0], vector)
