"""The files of sentence-transformers: modules, settings of texts, and what of them is refused."""

from pathlib import Path
from typing import Any

import pytest
from later import Later
from pooling_files import ST, put_json, put_modules, read

from models.config import ConfigError
from models.pooling.sentence_files import Dense, LayerNorm, Normalize, makes_vectors
from models.pooling.text_files import ChatForm


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
    pooling = Later("sentence_transformers.sentence_transformer.modules").Pooling
    pooling(32, list(modes), include_prompt=False).save(str(tmp_path / "1_Pooling"))  # pyright: ignore
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
    dense: dict[str, Any] = {
        "in_features": 32,
        "out_features": 16,
        "bias": False,
        "activation_function": "torch.nn.GELU",
    }
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
        Dense(folder="2_Dense", **dense),
        Normalize(),
        LayerNorm(folder="5_LayerNorm", dimension=16),
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
    put_json(tmp_path, f"sentence_{family}_config.json", {"max_seq_length": 256, "do_lower_case": True})
    read(tmp_path)
    put_json(
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
    put_json(tmp_path, "config_sentence_transformers.json", {"similarity_fn_name": written})
    assert read(tmp_path).texts.similarity == similarity


def test_a_measure_that_is_not_known_is_refused(tmp_path: Path) -> None:
    read(tmp_path)
    put_json(tmp_path, "config_sentence_transformers.json", {"similarity_fn_name": "hamming"})
    with pytest.raises(
        ConfigError, match="'similarity_fn_name' is 'hamming', but must be one of cosine, dot"
    ):
        read(tmp_path)


def as_messages(folder: Path, **processing: object) -> None:
    """Write what sentence-transformers 6 saves of a model whose tokenizer has a chat template."""
    put_modules(folder, ("Transformer", None), ("Pooling", {}))
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    modalities = {"text": forward, "message": {**forward, "format": "flat"}}
    put_json(
        folder,
        "sentence_bert_config.json",
        {"modality_config": modalities, "processing_kwargs": processing},
    )


def test_texts_that_are_messages(tmp_path: Path) -> None:
    as_messages(tmp_path)
    assert read(tmp_path).texts.chat == ChatForm()
    kwargs = {"add_generation_prompt": True, "task": "embed", "restore_suffix": False}
    as_messages(tmp_path, chat_template=kwargs, text={"padding": True})
    (tmp_path / "preprocessor_config.json").write_text("{}")
    wanted = ChatForm(
        add_generation_prompt=True, kwargs={"task": "embed"}, add_special_tokens=True, keeps_ending=False
    )
    assert read(tmp_path).texts.chat == wanted


def test_what_changes_messages_otherwise_is_refused(tmp_path: Path) -> None:
    as_messages(tmp_path, image={"max_pixels": 784})
    with pytest.raises(ConfigError, match="'max_pixels' of 'image' in 'processing_kwargs' is not supported"):
        read(tmp_path)
    message = {"method": "get_text_features"}
    put_json(tmp_path, "sentence_bert_config.json", {"modality_config": {"message": message}})
    with pytest.raises(
        ConfigError, match="'method' of 'message' in 'modality_config' is 'get_text_features'"
    ):
        read(tmp_path)


def test_a_default_prompt_that_is_not_there(tmp_path: Path) -> None:
    put_json(
        tmp_path, "config_sentence_transformers.json", {"prompts": {"a": ""}, "default_prompt_name": "b"}
    )
    with pytest.raises(ConfigError, match="'default_prompt_name' is 'b', but there are a"):
        read(tmp_path)


def test_files_that_are_no_json(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(ConfigError, match=r"modules\.json"):
        read(tmp_path)
