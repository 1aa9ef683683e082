"""Labels of classifiers: their number, names and activation, and tokens that serve as labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pooling_files import put_json, put_modules, read
from tiny import write_tokenizer

from models.config import ConfigError
from models.pooling.sentence_files import makes_scores


@pytest.mark.parametrize(
    ("fields", "count", "activation"),
    [
        ({}, 2, "softmax"),
        ({"num_labels": 1}, 1, "sigmoid"),
        ({"id2label": {"0": "bad", "1": "fair", "2": "good"}}, 3, "softmax"),
        ({"num_labels": 1, "problem_type": "regression"}, 1, "identity"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, 3, "sigmoid"),
        ({"num_labels": 1, "problem_type": "single_label_classification"}, 1, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, 2, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, 2, "sigmoid"),
    ],
)
def test_labels(tmp_path: Path, fields: dict[str, Any], count: int, activation: str) -> None:
    config = read(tmp_path, **fields)
    assert (config.num_labels, config.activation) == (count, activation)


def test_names_of_labels(tmp_path: Path) -> None:
    names = {"1": "dull", "0": "bright"}
    assert read(tmp_path, id2label=names).labels == ("bright", "dull")
    assert read(tmp_path, id2label=names, num_labels=3).labels == ()
    assert read(tmp_path).labels == ()


def test_the_activation_of_a_cross_encoder_beside_its_config(tmp_path: Path) -> None:
    settings = {"activation_fn": "torch.nn.modules.linear.Identity", "prompts": {}}
    put_json(tmp_path, "config_sentence_transformers.json", settings)
    assert read(tmp_path, num_labels=1).activation == "identity"


def test_an_activation_of_unknown_code(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'os\.system'; supported are Identity, Sigmoid and Softmax"):
        read(tmp_path, sentence_transformers={"activation_fn": "os.system"})


def test_labels_that_are_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    two_way = read(tmp_path, classifier_from_token=["<|pad|>", "a"], method="from_2_way_softmax")
    assert two_way.classifier_tokens[0] == 2
    assert (two_way.two_way, two_way.num_labels, two_way.activation) == (True, 1, "sigmoid")
    plain = read(tmp_path, classifier_from_token=["a", 7, "b"], method="no_post_processing")
    assert plain.classifier_tokens == (two_way.classifier_tokens[1], 7, plain.classifier_tokens[2])
    assert (plain.two_way, plain.num_labels, plain.activation) == (False, 3, "softmax")


def test_qwen3_reranker_needs_no_method(tmp_path: Path) -> None:
    config = read(tmp_path, is_original_qwen3_reranker=True, classifier_from_token=[4, 5])
    assert (config.classifier_tokens, config.two_way) == ((4, 5), True)


@pytest.mark.parametrize("false_token", [5, None])
def test_logit_score_of_sentence_transformers(tmp_path: Path, false_token: int | None) -> None:
    score = {"true_token_id": 9, "false_token_id": false_token, "module_input_name": "causal_logits"}
    put_modules(tmp_path, ("Transformer", None), ("LogitScore", score))
    config = read(tmp_path)
    assert config.classifier_tokens == ((5, 9) if false_token else (9,))
    assert (config.two_way, config.num_labels, config.activation) == (bool(false_token), 1, "sigmoid")
    assert makes_scores(tmp_path)


def test_tokens_whose_logits_a_step_is_judged_by(tmp_path: Path) -> None:
    asked = {"pooling_type": "STEP", "step_tag_id": 12, "returned_token_ids": [6, 3]}
    config = read(tmp_path, asked)
    assert (config.classifier_tokens, config.num_labels, config.step_tag_id) == ((6, 3), 2, 12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"classifier_from_token": ["no", "yes"]},
            "needs a 'method', not None. There are from_2_way_softmax",
        ),
        ({"classifier_from_token": ["a"], "method": "from_2_way_softmax"}, "two tokens .* not 1"),
        ({"classifier_from_token": ["xyzzy"], "method": "no_post_processing"}, "'xyzzy', which is no token"),
    ],
)
def test_tokens_that_cannot_be_labels(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **fields)


def test_tokens_need_a_tokenizer_or_ids(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json is needed"):
        read(tmp_path, classifier_from_token=["a"], method="no_post_processing")
