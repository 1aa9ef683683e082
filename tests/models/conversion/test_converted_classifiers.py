"""Scores of decoders made into classifiers, compared with transformers and sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pooled import (
    NO,
    PROMPTS,
    YES,
    Params,
    assert_near,
    causal_checkpoint,
    hf_output,
    load_pooled,
    pool,
    sibling_checkpoint,
)
from tiny import hf_logits, tiny_checkpoint
from tokenizers import Tokenizer

from models.pooling.config import PLAIN, TWO_WAY
from models.weight_slices import WeightsError
from worker import logs

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
        expected = hf_output(folder, architecture, tokens).logits[0]
        assert_near(logits, expected)
        assert_near(score, expected.sigmoid() if labels == 1 else expected.softmax(-1))


def test_labels_for_tokens(tmp_path: Path) -> None:
    architecture = "Qwen3ForTokenClassification"  # its score has a bias
    folder = sibling_checkpoint(architecture, "Qwen3ForCausalLM", tmp_path, num_labels=5)
    model = load_pooled(folder)
    assert model[0].pooler.tasks == {"token_classify"}
    for tokens, rows in zip(PROMPTS, pool(model, PROMPTS, Params("token_classify")), strict=True):
        assert_near(rows, hf_output(folder, architecture, tokens).logits[0].softmax(-1))


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
    expected = hf_output(folder, "LlamaForSequenceClassification", PROMPTS[0]).logits[0]
    assert_near(scores, (expected - 1) / 2)


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
    architecture: str, fields: dict[str, object], size: int, checkpoints: Path
) -> None:
    folder = causal_checkpoint(architecture, checkpoints)
    overrides = {"classifier_from_token": [NO, YES], "method": TWO_WAY, **fields}
    model = load_pooled(folder, size, runner="pooling", overrides=overrides)
    for tokens, score in zip(PROMPTS, pool(model, PROMPTS, Params("classify")), strict=True):
        assert_near(score, hf_logits(folder, tokens)[-1, [NO, YES]].softmax(-1)[1:])
    held = [p.shape for name, p in model[0].named_parameters() if "lm_head" in name]  # pyright: ignore
    assert held == [(2, 16 if architecture == "OPTForCausalLM" else 32)]


def test_tokens_as_labels(checkpoints: Path) -> None:
    folder = causal_checkpoint("LlamaForCausalLM", checkpoints)
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


def test_a_cross_encoder_by_logits(checkpoints: Path, tmp_path: Path) -> None:
    # Every process of tests collects this file: an import at its top would cost each some seconds.
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    source = causal_checkpoint("Qwen3ForCausalLM", checkpoints)
    transformer = Transformer(str(source), transformer_task="text-generation")
    encoder = CrossEncoder(modules=[transformer, LogitScore(YES, NO)], device="cpu")
    encoder.save_pretrained(str(tmp_path))
    model = load_pooled(tmp_path)
    assert type(model[0]).__name__ == "Qwen3ForSequenceClassification"
    for tokens, score in zip(PROMPTS, pool(model, PROMPTS, Params("classify")), strict=True):
        features = {"causal_logits": hf_logits(source, tokens)[None]}
        assert_near(score, encoder.activation_fn(LogitScore(YES, NO)(features)["scores"])[0])


def test_a_checkpoint_without_a_classifier(checkpoints: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        load_pooled(causal_checkpoint("LlamaForCausalLM", checkpoints), convert="classify")
    for way in ("score.weight", "classifier_from_token", TWO_WAY, PLAIN, "--convert embed"):
        assert way in str(caught.value)
    assert not logs.shorten(str(caught.value)).endswith(" ..."), "all ways are told"


def test_steps_judged_by_two_tokens(checkpoints: Path) -> None:
    """The tokens + and - at a step's tag say how good the step was, as in math-shepherd."""
    folder = causal_checkpoint("MistralForCausalLM", checkpoints)
    tag = 44
    asked = {"pooling_type": "STEP", "step_tag_id": tag, "returned_token_ids": [YES, NO]}
    model = load_pooled(folder, convert="reward", pooler_config=asked)
    assert model[0].pooler.tasks == {"token_classify"}
    tokens = [8, tag, 9, 10, 11, tag, 12, tag]
    (rows,) = pool(model, [tokens], Params("token_classify"))
    assert_near(rows, hf_logits(folder, tokens)[[1, 5, 7]][:, [YES, NO]].softmax(-1))


def test_half_precision(checkpoints: Path) -> None:
    """A head is float32 whatever type the trunk has."""
    folder = causal_checkpoint("LlamaForCausalLM", checkpoints)
    overrides = {"classifier_from_token": [NO, YES], "method": TWO_WAY}
    for runner in ("pooling", "generate"):
        model = load_pooled(folder, runner=runner, overrides=overrides, dtype=torch.bfloat16)
        (score,) = pool(model, PROMPTS[:1], Params("classify"))
        assert score.dtype == torch.float32
        expected = hf_logits(folder, PROMPTS[0])[-1, [NO, YES]].softmax(-1)[1:]
        torch.testing.assert_close(score, expected, atol=0.1, rtol=0)
