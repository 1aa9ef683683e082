"""What `--pooler-config` asks for, and the widths and the encoding of a pooling config."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from pooling_files import put_json, put_modules, read
from tiny import write_tokenizer

from models.config import ConfigError
from models.pooling.config import PoolingConfig
from models.pooling.sentence_files import makes_scores


def test_the_operator_has_the_last_word(tmp_path: Path) -> None:
    put_modules(tmp_path, ("Transformer", None), ("Pooling", {"pooling_mode": "mean"}), ("Normalize", None))
    config = read(tmp_path, {"pooling_type": "CLS", "use_activation": False, "dimensions": 8})
    assert config.modes == ("CLS",)
    assert config.use_activation is False
    assert config.dimensions == 8


@pytest.mark.parametrize(
    ("asked", "modes", "tokens"),
    [
        ({"pooling_type": "last"}, ("LAST",), None),
        ({"pooling_type": "ALL"}, (), "ALL"),
        ({"pooling_type": "STEP", "step_tag_id": 3}, (), "STEP"),
        ({"seq_pooling_type": "MEAN", "tok_pooling_type": "STEP", "step_tag_id": 3}, ("MEAN",), "STEP"),
    ],
)
def test_pooling_types(
    tmp_path: Path, asked: dict[str, object], modes: tuple[str, ...], tokens: str | None
) -> None:
    config = read(tmp_path, asked)
    assert (config.modes, config.tokens) == (modes, tokens)


@pytest.mark.parametrize("name", ["use_activation", "normalize", "softmax", "activation"])
def test_older_words_for_the_activation(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, {name: False}).use_activation is False


def test_calibration(tmp_path: Path) -> None:
    config = read(tmp_path, {"logit_mean": 2.65, "logit_sigma": 0.5})
    assert (config.logit_mean, config.logit_sigma) == (2.65, 0.5)
    assert read(tmp_path, {"logit_bias": 1.5}).logit_mean == 1.5
    assert (read(tmp_path).logit_mean, read(tmp_path).logit_sigma) == (0.0, 1.0)


@pytest.mark.parametrize(("name", "task"), [("score", "classify"), ("encode", None), ("embed", "embed")])
def test_tasks_by_their_older_names(tmp_path: Path, name: str, task: str | None) -> None:
    assert read(tmp_path, {"task": name}).task == task


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"poling_type": "CLS"}, "unknown field `poling_type`; its fields are task, pooling_type"),
        ({"pooling_type": "MEDIAN"}, "no pooling MEDIAN; there are CLS, LAST, MEAN"),
        ({"tok_pooling_type": "MEAN"}, "must be ALL or STEP"),
        ({"pooling_type": "CLS", "seq_pooling_type": "CLS"}, "set pooling_type, or seq_pooling_type"),
        ({"logit_sigma": 0}, "division by zero"),
        ({"dimensions": 0}, "at least 1"),
        ({"dimensions": "many"}, "dimensions"),
        ({"max_embed_len": 99}, "read in windows: say .enable_chunked_processing"),
        ({"enable_chunked_processing": True, "max_embed_len": 0}, ">= 1"),
        ({"task": "plugin"}, "no task 'plugin'; there are embed"),
    ],
)
def test_what_cannot_be_asked(tmp_path: Path, asked: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, asked)


def test_matryoshka(tmp_path: Path) -> None:
    assert not read(tmp_path).matryoshka
    assert read(tmp_path, is_matryoshka=True).matryoshka
    assert read(tmp_path, matryoshka_dimensions=[8, 16]).matryoshka_dimensions == (8, 16)


def test_it_survives_the_wire(tmp_path: Path) -> None:
    put_modules(
        tmp_path, ("Transformer", None), ("Pooling", {}), ("Dense", {"in_features": 2, "out_features": 2})
    )
    config = read(tmp_path)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=PoolingConfig) == config


# Labels of classifiers: their number, names and activation, and tokens that serve as labels.


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


def test_a_composite_has_its_head_beside_the_config_of_its_text(tmp_path: Path) -> None:
    config = read(tmp_path, text_config={"hidden_size": 32}, num_labels=7)
    assert config.num_labels == 7
    named = read(tmp_path, text_config={}, classifier_from_token=[4, 5], method="from_2_way_softmax")
    assert (named.classifier_tokens, named.two_way) == ((4, 5), True)


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
        (
            {"classifier_from_token": ["xyzzy"], "method": "no_post_processing"},
            "'xyzzy', which is not a token",
        ),
    ],
)
def test_tokens_that_cannot_be_labels(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **fields)


def test_tokens_need_a_tokenizer_or_ids(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json is needed"):
        read(tmp_path, classifier_from_token=["a"], method="no_post_processing")
