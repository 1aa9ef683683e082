"""Decoders made into embedders and classifiers, compared with transformers and sentence-transformers."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drive import Driver, load_ranks
from pooled import Params, load_pooled, pool, sibling_checkpoint
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Pooling
from tiny import hf_logits, tiny_checkpoint
from tokenizers import Tokenizer
from torch import Tensor, nn

from models.checkpoint.weights import WeightsError, load, open_weights
from models.config import ConfigError, read_config
from models.conversion.class_adapters import (
    adapt,
    as_embedding_model,
    as_pooling_model,
    as_seq_cls_model,
    as_token_cls_model,
    with_pooler,
)
from models.conversion.served_as import Conversion
from models.families.decoders.llama import LlamaForCausalLM
from models.families.decoders.qwen3 import Qwen3ForCausalLM
from models.families.reward import Qwen2ForRewardModel
from models.layers.attention import Attention
from models.model import ModelSetup
from models.pooling.config import PLAIN, TWO_WAY, PoolingConfig
from models.pooling.pooler import PoolBatch
from models.pooling.projection import Matrix

PROMPTS = [random.Random(seed).choices(range(5, 300), k=length) for seed, length in enumerate((23, 1, 9, 14))]
TEXTS = [
    "The quick brown fox",
    "jumps",
    "over the lazy dog, and there is nothing more to be said about that.",
]
NO, YES = 71, 200


@cache
def causal(architecture: str, root: Path, **overrides: Any) -> Path:
    name = "-".join([architecture, *(f"{key}={value}" for key, value in overrides.items())])
    return tiny_checkpoint(architecture, root / name, **overrides)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@torch.inference_mode()
def theirs(folder: Path, architecture: str, tokens: list[int]) -> Any:
    model = getattr(transformers, architecture).from_pretrained(folder, attn_implementation="eager")
    return model(torch.tensor([tokens]), use_cache=False)


def normalized(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


def forget_chat(folder: Path) -> None:
    """Remove the chat template, with which sentence-transformers would make a message of every text."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings))


def assert_near(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


# Classes


def test_classes_are_made_once_and_have_telling_names() -> None:
    assert as_embedding_model(Qwen3ForCausalLM) is as_embedding_model(Qwen3ForCausalLM)
    assert as_embedding_model(Qwen3ForCausalLM) is not as_embedding_model(LlamaForCausalLM)
    made = {
        "Qwen3ForEmbedding": as_embedding_model,
        "Qwen3ForSequenceClassification": as_seq_cls_model,
        "Qwen3ForTokenClassification": as_token_cls_model,
        "Qwen3ForCausalLMWithPooler": with_pooler,
    }
    for name, adapter in made.items():
        assert adapter(Qwen3ForCausalLM).__name__ == name
        assert adapter(Qwen3ForCausalLM).__module__ == "models.families.decoders.qwen3"


def test_a_class_that_pools_stays_as_it_is() -> None:
    embedder = as_embedding_model(LlamaForCausalLM)
    for adapter in (as_embedding_model, as_seq_cls_model, as_pooling_model, with_pooler):
        assert adapter(embedder) is embedder
        assert adapter(Qwen2ForRewardModel) is Qwen2ForRewardModel


def test_the_original_is_not_touched() -> None:
    before = dict(vars(Qwen3ForCausalLM))
    made = as_embedding_model(Qwen3ForCausalLM)
    assert dict(vars(Qwen3ForCausalLM)) == before
    assert not issubclass(made, Qwen3ForCausalLM)


@pytest.mark.parametrize(
    ("runner", "convert", "labels_tokens", "name"),
    [
        ("generate", "none", False, "LlamaForCausalLMWithPooler"),
        ("generate", "embed", False, "LlamaForCausalLMWithPooler"),
        ("pooling", "embed", False, "LlamaForEmbedding"),
        ("pooling", "classify", False, "LlamaForSequenceClassification"),
        ("pooling", "classify", True, "LlamaForTokenClassification"),
        ("pooling", "reward", True, "LlamaForTokenClassification"),
    ],
)
def test_adapt(runner: Any, convert: Any, labels_tokens: bool, name: str) -> None:
    conversion = Conversion(
        runner=runner, convert=convert, architecture="LlamaForCausalLM", labels_tokens=labels_tokens
    )
    assert adapt(LlamaForCausalLM, conversion).__name__ == name


# Vectors


TRUNKS = [
    ("LlamaModel", "LlamaForCausalLM"),
    ("MistralModel", "MistralForCausalLM"),
    ("Qwen2Model", "Qwen2ForCausalLM"),
    ("Qwen3Model", "Qwen3ForCausalLM"),
    ("Gemma3TextModel", "Gemma3ForCausalLM"),
    ("GPT2Model", "GPT2LMHeadModel"),
    ("OPTModel", "OPTForCausalLM"),  # gives states of another width than its layers have
    ("Starcoder2Model", "Starcoder2ForCausalLM"),  # on transformers' code
]


@pytest.mark.parametrize(("trunk", "generating"), TRUNKS)
def test_a_trunk_alone_and_a_generating_checkpoint_embed_alike(
    trunk: str, generating: str, tmp_path: Path
) -> None:
    bare = sibling_checkpoint(trunk, generating, tmp_path)
    expected = [normalized(theirs(bare, trunk, tokens).last_hidden_state[0]) for tokens in PROMPTS]
    for folder in (bare, tmp_path / "generating"):
        model = load_pooled(folder, convert="embed")
        assert model[0].pooler.tasks == {"embed", "token_embed"}
        assert not [name for name, _ in model[0].named_parameters() if "head" in name]  # pyright: ignore
        for vector, rows in zip(pool(model, PROMPTS), expected, strict=True):
            assert_near(vector, rows[-1])
        for vectors, rows in zip(pool(model, PROMPTS, Params("token_embed")), expected, strict=True):
            assert_near(vectors, rows)


@pytest.mark.parametrize("mode", ["CLS", "LAST", "MEAN"])
@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_no_pooling_minds_chunks(mode: str, chunk: int, root: Path) -> None:
    model = load_pooled(
        causal("Qwen3ForCausalLM", root), convert="embed", pooler_config={"pooling_type": mode}
    )
    for whole, chunked in zip(pool(model, PROMPTS), pool(model, PROMPTS, chunk=chunk), strict=True):
        assert_near(chunked, whole)


def test_no_head_is_held(root: Path) -> None:
    folder = causal("LlamaForCausalLM", root)
    whole = sum(p.numel() for p in load_pooled(folder, runner="generate")[0].parameters())
    embedder = sum(p.numel() for p in load_pooled(folder, convert="embed")[0].parameters())
    head = 320 * 32
    assert whole - embedder == head


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_give_the_same_vector(size: int, root: Path) -> None:
    folder = causal("Qwen3ForCausalLM", root)
    one, several = (pool(load_pooled(folder, ranks, convert="embed"), PROMPTS) for ranks in (1, size))
    for a, b in zip(one, several, strict=True):
        assert_near(b, a)


def test_a_classifiers_trunk_can_embed(tmp_path: Path) -> None:
    folder = sibling_checkpoint("Qwen3ForSequenceClassification", "Qwen3ForCausalLM", tmp_path)
    for vector, other in zip(
        pool(load_pooled(folder, convert="embed"), PROMPTS),
        pool(load_pooled(tmp_path / "generating", convert="embed"), PROMPTS),
        strict=True,
    ):
        assert torch.equal(vector, other)


@pytest.mark.parametrize("modes", ["mean", "lasttoken", "weightedmean", ("cls", "max")])
@pytest.mark.parametrize("half", [False, True])
def test_sentence_transformers_computes_the_same(modes: Any, half: bool, tmp_path: Path) -> None:
    source = tiny_checkpoint("Qwen3ForCausalLM", tmp_path / "generating")
    forget_chat(source)
    transformer = Transformer(str(source))
    pooling = Pooling(transformer.get_embedding_dimension(), modes)
    torch.manual_seed(0)
    dense = Dense(pooling.get_embedding_dimension(), 24)
    SentenceTransformer(modules=[transformer, pooling, dense, Normalize()], device="cpu").save(str(tmp_path))
    reference = SentenceTransformer(str(tmp_path), device="cpu")
    expected = torch.tensor(reference.encode(TEXTS, truncate_dim=12 if half else None))
    if half:
        expected = normalized(expected)

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = [tokenizer.encode(text).ids for text in TEXTS]
    model = load_pooled(tmp_path)
    assert model[0].pooler.width(Params()) == 24
    vectors = pool(model, tokens, Params(dimensions=12 if half else None))
    assert_near(torch.stack(vectors), expected)


# Decoders that look ahead


def test_gemma3_in_both_directions(tmp_path: Path) -> None:
    """Half of the layers see everything, the others three tokens on each side, as in EmbeddingGemma."""
    fields = {"use_bidirectional_attention": True, "sliding_window": 6}
    folder = sibling_checkpoint("Gemma3TextModel", "Gemma3ForCausalLM", tmp_path, **fields)
    assert json.loads((folder / "config.json").read_text())["sliding_window"] == 6
    model = load_pooled(folder, pooler_config={"pooling_type": "MEAN"})
    assert not model[0].causal
    assert model[0].attention_layers() == []
    for tokens, vector in zip(PROMPTS, pool(model, PROMPTS), strict=True):
        rows = theirs(folder, "Gemma3TextModel", tokens).last_hidden_state[0]
        assert_near(vector, normalized(rows.mean(0)))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_a_decoder_told_not_to_be_causal(architecture: str, root: Path) -> None:
    folder = causal(architecture, root)
    model = load_pooled(folder, convert="embed", overrides={"is_causal": False})
    reference = getattr(transformers, architecture).from_pretrained(folder, attn_implementation="eager")
    for tokens, vectors in zip(PROMPTS, pool(model, PROMPTS, Params("token_embed")), strict=True):
        count = len(tokens)
        unmasked = torch.zeros(1, 1, count, count)
        with torch.inference_mode():
            output = reference.model(torch.tensor([tokens]), attention_mask=unmasked, use_cache=False)
        assert_near(vectors, normalized(output.last_hidden_state[0]))


def test_a_class_that_cannot_look_ahead(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"attends in both directions, and GPT2ForEmbedding cannot"):
        load_pooled(causal("GPT2LMHeadModel", root), convert="embed", overrides={"is_causal": False})


# Labels


CLASSIFIERS = [
    ("LlamaForSequenceClassification", "LlamaForCausalLM"),
    ("MistralForSequenceClassification", "MistralForCausalLM"),
    ("Qwen2ForSequenceClassification", "Qwen2ForCausalLM"),
    ("Qwen3ForSequenceClassification", "Qwen3ForCausalLM"),
    ("Gemma2ForSequenceClassification", "Gemma2ForCausalLM"),
    ("GPT2ForSequenceClassification", "GPT2LMHeadModel"),
    ("OPTForSequenceClassification", "OPTForCausalLM"),
    ("Starcoder2ForSequenceClassification", "Starcoder2ForCausalLM"),
]


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize(("architecture", "generating"), CLASSIFIERS)
def test_classifiers(architecture: str, generating: str, labels: int, tmp_path: Path) -> None:
    folder = sibling_checkpoint(architecture, generating, tmp_path, num_labels=labels)
    model = load_pooled(folder)
    assert model[0].pooler.tasks == {"classify", "token_classify"}
    raw = pool(model, PROMPTS, Params("classify", use_activation=False))
    scores = pool(model, PROMPTS, Params("classify"))
    for tokens, logits, score in zip(PROMPTS, raw, scores, strict=True):
        expected = theirs(folder, architecture, tokens).logits[0]
        assert_near(logits, expected)
        assert_near(score, expected.sigmoid() if labels == 1 else expected.softmax(-1))


def test_labels_for_tokens(tmp_path: Path) -> None:
    architecture = "Qwen3ForTokenClassification"  # its score has a bias
    folder = sibling_checkpoint(architecture, "Qwen3ForCausalLM", tmp_path, num_labels=5)
    model = load_pooled(folder)
    assert model[0].pooler.tasks == {"token_classify"}
    for tokens, rows in zip(PROMPTS, pool(model, PROMPTS, Params("token_classify")), strict=True):
        assert_near(rows, theirs(folder, architecture, tokens).logits[0].softmax(-1))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("Qwen3ForCausalLM", {}),  # tied
        ("LlamaForCausalLM", {}),  # not tied
        ("Gemma2ForCausalLM", {}),  # capped, and its embeddings are scaled
        ("GraniteForCausalLM", {}),  # scaled
        ("OPTForCausalLM", {}),  # projected
    ],
)
def test_two_tokens_give_the_probability_of_the_second(
    architecture: str, fields: dict[str, object], size: int, root: Path
) -> None:
    folder = causal(architecture, root)
    overrides = {"classifier_from_token": [NO, YES], "method": TWO_WAY, **fields}
    model = load_pooled(folder, size, runner="pooling", overrides=overrides)
    for tokens, score in zip(PROMPTS, pool(model, PROMPTS, Params("classify")), strict=True):
        assert_near(score, hf_logits(folder, tokens)[-1, [NO, YES]].softmax(-1)[1:])
    held = [p.shape for name, p in model[0].named_parameters() if "lm_head" in name]  # pyright: ignore
    assert held == [(2, 16 if architecture == "OPTForCausalLM" else 32)]


def test_tokens_as_labels(root: Path) -> None:
    folder = causal("LlamaForCausalLM", root)
    overrides = {"classifier_from_token": [NO, YES, 5], "method": PLAIN}
    model = load_pooled(folder, convert="classify", overrides=overrides)
    for tokens, scores in zip(PROMPTS, pool(model, PROMPTS, Params("classify")), strict=True):
        assert_near(scores, hf_logits(folder, tokens)[-1, [NO, YES, 5]].softmax(-1))


def test_the_words_of_qwen3_reranker(tmp_path: Path) -> None:
    folder = tiny_checkpoint("Qwen3ForCausalLM", tmp_path)
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    model = load_pooled(folder, overrides=overrides)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    no, yes = tokenizer.token_to_id("n"), tokenizer.token_to_id("y")
    for tokens, score in zip(PROMPTS, pool(model, PROMPTS, Params("classify")), strict=True):
        assert_near(score, hf_logits(folder, tokens)[-1, [no, yes]].softmax(-1)[1:])


def test_a_cross_encoder_by_logits(root: Path, tmp_path: Path) -> None:
    source = causal("Qwen3ForCausalLM", root)
    transformer = Transformer(str(source), transformer_task="text-generation")
    encoder = CrossEncoder(modules=[transformer, LogitScore(YES, NO)], device="cpu")
    encoder.save_pretrained(str(tmp_path))
    model = load_pooled(tmp_path)
    assert type(model[0]).__name__ == "Qwen3ForSequenceClassification"
    for tokens, score in zip(PROMPTS, pool(model, PROMPTS, Params("classify")), strict=True):
        features = {"causal_logits": hf_logits(source, tokens)[None]}
        assert_near(score, encoder.activation_fn(LogitScore(YES, NO)(features)["scores"])[0])


def test_a_checkpoint_without_a_classifier(root: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        load_pooled(causal("LlamaForCausalLM", root), convert="classify")
    for way in ("score.weight", "classifier_from_token", TWO_WAY, PLAIN, "--convert embed"):
        assert way in str(caught.value)


def test_steps_judged_by_two_tokens(root: Path) -> None:
    """The tokens + and - at a step's tag say how good the step was, as in math-shepherd."""
    folder = causal("MistralForCausalLM", root)
    tag = 44
    asked = {"pooling_type": "STEP", "step_tag_id": tag, "returned_token_ids": [YES, NO]}
    model = load_pooled(folder, convert="reward", pooler_config=asked)
    assert model[0].pooler.tasks == {"token_classify"}
    tokens = [8, tag, 9, 10, 11, tag, 12, tag]
    (rows,) = pool(model, [tokens], Params("token_classify"))
    assert_near(rows, hf_logits(folder, tokens)[[1, 5, 7]][:, [YES, NO]].softmax(-1))


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
def test_an_encoder_gets_the_pooler_of_its_head(encoder: type[Encoder], tasks: set[str], root: Path) -> None:
    config = read_config(causal("LlamaForCausalLM", root))
    pooling = PoolingConfig(num_labels=3)
    made = as_pooling_model(encoder)
    assert made.__name__ == encoder.__name__
    model = made(ModelSetup(config=config, folder=root, max_len=8, pooling=pooling))
    load(model, open_weights(root, "dummy", device=torch.device("cpu"), dtype=torch.float32))
    assert (model.pooler.tasks, model.causal) == (tasks, False)
    task = sorted(tasks)[0]
    ids = torch.tensor([7, 8, 9])
    hidden = model(ids, ids)
    (answer,) = model.pooler(PoolBatch(hidden, ids, [3], [Params(task, use_activation=False)]))
    rows = hidden if task.startswith("token") else hidden[:1]  # CLS
    expected = model.base.head(rows) if model.base.head else rows
    torch.testing.assert_close(answer.view_as(expected), expected)


# Everything from one copy


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM", "Starcoder2ForCausalLM"])
def test_a_model_that_generates_also_pools(architecture: str, root: Path) -> None:
    folder = causal(architecture, root)
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


def test_without_labels_it_embeds_only(root: Path) -> None:
    model = load_pooled(causal("Qwen3ForCausalLM", root), runner="generate")
    assert model[0].pooler.tasks == {"embed", "token_embed"}
    assert model[0].causal


def test_half_precision(root: Path) -> None:
    """A head is float32 whatever type the trunk has."""
    folder = causal("LlamaForCausalLM", root)
    overrides = {"classifier_from_token": [NO, YES], "method": TWO_WAY}
    for runner in ("pooling", "generate"):
        model = load_pooled(folder, runner=runner, overrides=overrides, dtype=torch.bfloat16)
        (score,) = pool(model, PROMPTS[:1], Params("classify"))
        assert score.dtype == torch.float32
        expected = hf_logits(folder, PROMPTS[0])[-1, [NO, YES]].softmax(-1)[1:]
        torch.testing.assert_close(score, expected, atol=0.1, rtol=0)


def test_labels_of_the_config(tmp_path: Path) -> None:
    folder = sibling_checkpoint(
        "LlamaForSequenceClassification",
        "LlamaForCausalLM",
        tmp_path,
        num_labels=2,
        problem_type="regression",
    )
    assert json.loads((folder / "config.json").read_text())["problem_type"] == "regression"
    model = load_pooled(folder, pooler_config={"logit_mean": 1.0, "logit_sigma": 2.0})
    (scores,) = pool(model, PROMPTS[:1], Params("classify"))
    expected = theirs(folder, "LlamaForSequenceClassification", PROMPTS[0]).logits[0]
    assert_near(scores, (expected - 1) / 2)
