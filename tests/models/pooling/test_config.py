from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sentence_transformers.sentence_transformer.modules import Pooling as TheirPooling
from tiny import VOCAB_SIZE, write_tokenizer

from models.config import ConfigError, ModelConfig, read_config
from models.pooling.config import PoolingConfig, read_pooling
from models.pooling.sentence_files import Dense, LayerNorm, Normalize, makes_scores, makes_vectors

ST = "sentence_transformers.models"
CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
}


def put(folder: Path, name: str, content: object) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def put_modules(folder: Path, *modules: tuple[str, dict[str, object] | None], library: str = ST) -> None:
    """Write modules.json, and each module's config in a folder named as the library names it."""
    listed = []
    for index, (kind, config) in enumerate(modules):
        path = "" if kind == "Transformer" else f"{index}_{kind}"
        name = kind if "." in kind else f"{library}.{kind}"
        listed.append({"idx": index, "name": str(index), "path": path, "type": name})
        if config is not None:
            put(folder, f"{path}/config.json" if path else "unused.json", config)
    put(folder, "modules.json", listed)


def config_of(folder: Path, **fields: object) -> ModelConfig:
    put(folder, "config.json", CONFIG | fields)
    return read_config(folder)


def read(folder: Path, asked: dict[str, object] | None = None, **fields: Any) -> PoolingConfig:
    return read_pooling(folder, config_of(folder, **fields), asked or {})


# Sentence-transformers files


def test_a_folder_without_any(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.modes == ()
    assert config.normalize
    assert config.steps == ()
    assert not makes_vectors(tmp_path)


@pytest.mark.parametrize("library", [ST, "sentence_transformers.sentence_transformer.modules.pooling"])
@pytest.mark.parametrize(
    ("fields", "modes"),
    [
        ({"pooling_mode": "mean"}, ("MEAN",)),
        ({"pooling_mode": ["lasttoken", "cls"]}, ("LAST", "CLS")),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("CLS",)),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, ("MEAN_SQRT_LEN",)),
        ({"pooling_mode_weightedmean_tokens": True}, ("WEIGHTED_MEAN",)),
        ({"pooling_mode_lasttoken": True}, ("LAST",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, ("MAX", "MEAN")),
        ({"pooling_mode_cls_token": False}, ("MEAN",)),
    ],
)
def test_pooling(tmp_path: Path, library: str, fields: dict[str, object], modes: tuple[str, ...]) -> None:
    put_modules(tmp_path, ("Transformer", None), ("Pooling", fields), library=library)
    config = read(tmp_path)
    assert config.modes == modes
    assert config.include_prompt
    assert not config.normalize
    assert makes_vectors(tmp_path)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("modes", [("max",), ("cls", "weightedmean"), ("mean_sqrt_len_tokens",)])
def test_pooling_as_sentence_transformers_writes_it(tmp_path: Path, modes: tuple[str, ...]) -> None:
    put_modules(tmp_path, ("Transformer", None), ("Pooling", None))
    (tmp_path / "1_Pooling").mkdir()
    TheirPooling(32, list(modes), include_prompt=False).save(str(tmp_path / "1_Pooling"))  # pyright: ignore
    config = read(tmp_path)
    named = {
        "max": "MAX",
        "cls": "CLS",
        "weightedmean": "WEIGHTED_MEAN",
        "mean_sqrt_len_tokens": "MEAN_SQRT_LEN",
    }
    assert config.modes == tuple(named[mode] for mode in modes)
    assert not config.include_prompt


@pytest.mark.parametrize("fields", [{"pooling_mode": "median"}, {"pooling_mode_median_tokens": True}])
def test_pooling_that_is_not_known(tmp_path: Path, fields: dict[str, object]) -> None:
    put_modules(tmp_path, ("Transformer", None), ("Pooling", fields))
    with pytest.raises(ConfigError, match=r"1_Pooling.config\.json.*median"):
        read(tmp_path)


def test_the_chain_after_pooling(tmp_path: Path) -> None:
    dense = {"in_features": 32, "out_features": 16, "bias": False, "activation_function": "torch.nn.GELU"}
    put_modules(
        tmp_path,
        ("Transformer", None),
        ("Pooling", {"pooling_mode": "mean"}),
        ("Dense", dense),
        ("Dropout", {"dropout": 0.1}),
        ("Normalize", None),
        ("LayerNorm", {"dimension": 16}),
        ("Normalize", None),
    )
    config = read(tmp_path)
    assert config.steps == (
        Dense(folder="2_Dense", inputs=32, outputs=16, bias=False, activation="torch.nn.GELU"),
        Normalize(),
        LayerNorm(folder="5_LayerNorm", size=16),
    )
    assert config.normalize


@pytest.mark.parametrize(
    "dense",
    [
        ("pylate.models.Dense.Dense", {}),
        ("sentence_transformers.base.modules.dense.Dense", {"module_input_name": "token_embeddings"}),
    ],
)
def test_vectors_for_tokens_only(tmp_path: Path, dense: tuple[str, dict[str, object]]) -> None:
    name, fields = dense
    put_modules(tmp_path, ("Transformer", None), (name, {"in_features": 32, "out_features": 8} | fields))
    config = read(tmp_path)
    assert [type(step) for step in config.token_steps] == [Dense]
    assert config.modes == ()
    assert config.normalize
    assert not makes_vectors(tmp_path)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ((("Transformer", None), ("WordWeights", {})), r"module sentence_transformers\.models\.WordWeights"),
        ((("custom_st.Transformer", None),), r"module custom_st\.Transformer, which is not supported"),
        ((("Transformer", None), ("Pooling", None)), r"1_Pooling.config\.json cannot be read"),
        (
            (("Transformer", None), ("Dense", {"in_features": 2, "out_features": 2})),
            "turns sentence_embedding into sentence_embedding before pooling",
        ),
        (
            (
                ("Transformer", None),
                ("Pooling", {}),
                ("Dense", {"in_features": 2, "out_features": 2, "module_output_name": "scores"}),
            ),
            "turns sentence_embedding into scores after pooling",
        ),
        ((("Transformer", None), ("Pooling", {}), ("Dense", {"in_features": 2})), "out_features"),
        ((("Transformer", None), ("Pooling", {}), ("Pooling", {})), "more than one Pooling"),
    ],
)
def test_modules_that_we_cannot_follow(
    tmp_path: Path, modules: tuple[tuple[str, dict[str, object] | None], ...], message: str
) -> None:
    put_modules(tmp_path, *modules)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
def test_how_texts_are_read(tmp_path: Path, family: str) -> None:
    put_modules(tmp_path, ("Transformer", None), ("Pooling", {}))
    put(tmp_path, f"sentence_{family}_config.json", {"max_seq_length": 256, "do_lower_case": True})
    read(tmp_path)
    put(
        tmp_path,
        "config_sentence_transformers.json",
        {
            "__version__": {"sentence_transformers": "5.0.0"},
            "prompts": {"query": "Query: ", "document": None},
            "default_prompt_name": "query",
            "similarity_fn_name": "dot",
            "truncate_dim": 16,
        },
    )
    config = read(tmp_path)
    assert (config.texts.max_len, config.texts.lower_case) == (256, True)
    assert config.texts.prompts == {"query": "Query: ", "document": ""}
    assert (config.texts.default_prompt_name, config.texts.similarity) == ("query", "dot")
    assert config.dimensions == 16


@pytest.mark.parametrize(
    ("written", "similarity"), [(None, "cosine"), ("euclidean", "euclidean"), ("MaxSim", "maxsim")]
)
def test_the_measure_of_similarity(tmp_path: Path, written: str | None, similarity: str) -> None:
    read(tmp_path)
    put(tmp_path, "config_sentence_transformers.json", {"similarity_fn_name": written})
    assert read(tmp_path).texts.similarity == similarity


def test_a_measure_that_is_not_known_is_refused(tmp_path: Path) -> None:
    read(tmp_path)
    put(tmp_path, "config_sentence_transformers.json", {"similarity_fn_name": "hamming"})
    with pytest.raises(
        ConfigError, match="'similarity_fn_name' is 'hamming', but must be one of cosine, dot"
    ):
        read(tmp_path)


def test_texts_that_are_messages(tmp_path: Path) -> None:
    """A model whose tokenizer has a chat template is saved so by sentence-transformers 6."""
    put_modules(tmp_path, ("Transformer", None), ("Pooling", {}))
    put(
        tmp_path,
        "sentence_bert_config.json",
        {"modality_config": {"text": {}, "message": {"format": "flat"}}},
    )
    with pytest.raises(ConfigError, match="writes every text as a chat message"):
        read(tmp_path)


def test_a_default_prompt_that_is_not_there(tmp_path: Path) -> None:
    put(tmp_path, "config_sentence_transformers.json", {"prompts": {"a": ""}, "default_prompt_name": "b"})
    with pytest.raises(ConfigError, match="'default_prompt_name' is 'b', but there are a"):
        read(tmp_path)


def test_files_that_are_no_json(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(ConfigError, match=r"modules\.json"):
        read(tmp_path)


# --pooler-config


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
        ({"enable_chunked_processing": True, "max_embed_len": 99}, "in pieces.* are not supported"),
        ({"max_embed_len": 99}, "in pieces.* are not supported"),
        ({"task": "plugin"}, "no task 'plugin'; there are embed"),
    ],
)
def test_what_cannot_be_asked(tmp_path: Path, asked: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, asked)


# Labels


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
    put(tmp_path, "config_sentence_transformers.json", settings)
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
