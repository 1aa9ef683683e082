import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from models import plugins
from models.config import ConfigError, read_config
from models.conversion.conversion_choice import resolve_conversion, stem


def write(folder: Path, architectures: list[str], **fields: object) -> None:
    config: dict[str, object] = {
        "architectures": architectures,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config | fields))


def resolve(
    folder: Path,
    architecture: str,
    runner: str = "auto",
    convert: str = "auto",
    modules: tuple[str, ...] = (),
    **fields: object,
) -> tuple[str, str, str]:
    write(folder, [architecture], **fields)
    if modules:
        listed = [{"idx": i, "path": str(i), "type": name} for i, name in enumerate(modules)]
        (folder / "modules.json").write_text(json.dumps(listed))
    result = resolve_conversion(read_config(folder), folder, runner=runner, convert=convert)
    return result.runner, result.convert, result.architecture


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("Qwen3ForCausalLM", ("generate", "none", "Qwen3ForCausalLM")),
        ("GPT2LMHeadModel", ("generate", "none", "GPT2LMHeadModel")),
        ("SomethingNew", ("generate", "none", "SomethingNew")),
        ("Qwen3Model", ("pooling", "embed", "Qwen3ForCausalLM")),
        ("GPT2Model", ("pooling", "embed", "GPT2LMHeadModel")),
        ("Gemma3TextModel", ("pooling", "embed", "Gemma3ForCausalLM")),
        ("CohereModel", ("pooling", "embed", "CohereForCausalLM")),
        ("LlamaForSequenceClassification", ("pooling", "classify", "LlamaForCausalLM")),
        ("GPT2ForSequenceClassification", ("pooling", "classify", "GPT2LMHeadModel")),
        ("Qwen3ForTokenClassification", ("pooling", "classify", "Qwen3ForCausalLM")),
        ("Qwen3ForQuestionClassification", ("pooling", "classify", "Qwen3ForCausalLM")),
        ("LlamaForMultiLabelClassification", ("pooling", "classify", "LlamaForCausalLM")),
        ("GPT2ForClassification", ("pooling", "classify", "GPT2LMHeadModel")),
        ("BigForestForImageClassification", ("pooling", "classify", "BigForestForCausalLM")),
        ("LlamaForRewardModel", ("pooling", "embed", "LlamaForCausalLM")),
        ("LlamaForRewardModeling", ("pooling", "embed", "LlamaForCausalLM")),
        ("Qwen2ForRewardModel", ("pooling", "none", "Qwen2ForRewardModel")),
        ("Qwen2ForProcessRewardModel", ("pooling", "none", "Qwen2ForProcessRewardModel")),
        ("ColPaliForRetrieval", ("pooling", "none", "ColPaliForRetrieval")),
        ("ColQwen2ForRetrieval", ("pooling", "none", "ColQwen2ForRetrieval")),
        ("JinaVLForRanking", ("pooling", "none", "JinaVLForRanking")),
        ("BertModel", ("pooling", "none", "BertModel")),
        ("BertForMaskedLM", ("pooling", "none", "BertForMaskedLM")),
        ("BertForSequenceClassification", ("pooling", "none", "BertForSequenceClassification")),
    ],
)
def test_by_name_alone(tmp_path: Path, architecture: str, expected: tuple[str, str, str]) -> None:
    assert resolve(tmp_path, architecture) == expected


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_head_for_rewards_is_used(tmp_path: Path, file: str) -> None:
    save_file({"score.weight": np.zeros((1, 4), np.float32)}, tmp_path / file)
    assert resolve(tmp_path, "LlamaForRewardModel") == ("pooling", "reward", "LlamaForCausalLM")


class Writer:
    def logits(self) -> None: ...


class Reader: ...


def test_a_registered_class_that_generates_does_so_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_classes", {"WriterModel": Writer, "ReaderModel": Reader})
    assert resolve(tmp_path, "WriterModel") == ("generate", "none", "WriterModel")
    assert resolve(tmp_path, "WriterModel", "pooling") == ("pooling", "embed", "WriterModel")
    assert resolve(tmp_path, "ReaderModel") == ("pooling", "none", "ReaderModel")


@pytest.mark.parametrize(
    ("architecture", "runner", "convert", "expected"),
    [
        ("Qwen3ForCausalLM", "pooling", "auto", ("pooling", "embed")),
        ("Qwen3ForCausalLM", "auto", "embed", ("pooling", "embed")),
        ("Qwen3ForCausalLM", "auto", "classify", ("pooling", "classify")),
        ("Qwen3ForCausalLM", "auto", "reward", ("pooling", "reward")),
        ("Qwen3ForCausalLM", "auto", "none", ("generate", "none")),
        ("Qwen3ForCausalLM", "generate", "embed", ("generate", "embed")),
        ("LlamaForSequenceClassification", "pooling", "embed", ("pooling", "embed")),
        ("LlamaForSequenceClassification", "auto", "embed", ("pooling", "embed")),
        ("BertModel", "pooling", "embed", ("pooling", "none")),
        ("BertForSequenceClassification", "auto", "classify", ("pooling", "none")),
    ],
)
def test_as_asked(
    tmp_path: Path, architecture: str, runner: str, convert: str, expected: tuple[str, str]
) -> None:
    assert resolve(tmp_path, architecture, runner, convert)[:2] == expected


def test_what_was_resolved_resolves_to_itself(tmp_path: Path) -> None:
    for architecture in ("Qwen3ForCausalLM", "LlamaForSequenceClassification", "BertModel"):
        runner, convert, built = resolve(tmp_path, architecture)
        assert resolve(tmp_path, architecture, runner, convert) == (runner, convert, built)


POOLING = ("sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling")


def test_an_embedder_in_the_clothes_of_a_generator(tmp_path: Path) -> None:
    """Qwen3-Embedding is such a checkpoint."""
    assert resolve(tmp_path, "Qwen3ForCausalLM", modules=POOLING)[:2] == ("pooling", "embed")
    assert resolve(tmp_path, "Qwen3ForCausalLM", convert="none")[:2] == ("generate", "none")
    assert resolve(tmp_path, "Qwen3ForCausalLM", runner="generate")[:2] == ("generate", "none")


def test_a_reranker_in_the_clothes_of_a_generator(tmp_path: Path) -> None:
    score = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    modules = ("sentence_transformers.base.modules.transformer.Transformer", score)
    assert resolve(tmp_path, "Qwen3ForCausalLM", modules=modules)[:2] == ("pooling", "classify")
    assert resolve(tmp_path, "Qwen3ForCausalLM", "generate", "classify")[:2] == ("generate", "classify")


def test_labels_that_are_tokens(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}
    assert resolve(tmp_path, "Qwen3ForCausalLM", "pooling", **fields)[:2] == ("pooling", "classify")
    assert resolve(tmp_path, "Qwen3ForCausalLM", "generate", "classify", **fields)[:2] == (
        "generate",
        "classify",
    )
    assert resolve(tmp_path, "Qwen3ForCausalLM", **fields)[:2] == ("generate", "none")
    original: dict[str, Any] = {"is_original_qwen3_reranker": True}
    assert resolve(tmp_path, "Qwen3ForSequenceClassification", **original) == (
        "pooling",
        "classify",
        "Qwen3ForCausalLM",
    )


@pytest.mark.parametrize(
    ("architectures", "options", "served"),
    [
        (["BertForPuzzles", "LlamaForCausalLM", "Qwen3ForCausalLM"], {}, "LlamaForCausalLM"),
        (["LlamaForPuzzles", "LlamaForSequenceClassification"], {}, "LlamaForCausalLM"),
        (["LlamaForCausalLM", "Jais2ForCausalLM"], {}, "LlamaForCausalLM"),
        (["LlamaForPuzzles", "Jais2ForCausalLM"], {}, "Jais2ForCausalLM"),
        (["BertModel", "LlamaForCausalLM"], {}, "BertModel"),
        (["BertModel", "LlamaForCausalLM"], {"model_impl": "transformers"}, "LlamaForCausalLM"),
        (["Jais2ForCausalLM", "LlamaForCausalLM"], {"model_impl": "facet"}, "LlamaForCausalLM"),
        (["HomeForCausalLM", "LlamaForCausalLM"], {"trust_remote_code": True}, "HomeForCausalLM"),
        (["HomeForCausalLM", "LlamaForCausalLM"], {}, "LlamaForCausalLM"),
    ],
)
def test_the_first_architecture_that_is_served(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    architectures: list[str],
    options: dict[str, Any],
    served: str,
) -> None:
    code = {"AutoModelForCausalLM": "modeling_home.HomeForCausalLM"}
    write(tmp_path, architectures, auto_map=code)
    with caplog.at_level("INFO", "models"):
        conversion = resolve_conversion(read_config(tmp_path), tmp_path, **options)
    assert conversion.architecture == served
    assert f"names the architectures {', '.join(architectures)}: " in caplog.text


def test_one_architecture_is_not_worth_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "models"):
        resolve(tmp_path, "LlamaForCausalLM")
    assert not caplog.text


def test_several_architectures_of_which_none_is_served(tmp_path: Path) -> None:
    write(tmp_path, ["BertForPuzzles", "LlamaForPuzzles"])
    with pytest.raises(
        ConfigError, match=r"BertForPuzzles, LlamaForPuzzles, none of which .* docs/models\.md"
    ):
        resolve_conversion(read_config(tmp_path), tmp_path)


def test_labels_for_tokens(tmp_path: Path) -> None:
    resolve(tmp_path, "Qwen3ForTokenClassification")
    config = read_config(tmp_path)
    assert resolve_conversion(config, tmp_path).labels_tokens
    resolve(tmp_path, "Qwen3ForCausalLM")
    config = read_config(tmp_path)
    assert resolve_conversion(config, tmp_path, convert="reward").labels_tokens
    assert not resolve_conversion(config, tmp_path, convert="classify").labels_tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("BertModel", "generate"), "BertModel has no head that generates: serve it with --runner pooling$"),
        (("Qwen3Model", "generate"), r"pooling; or, .*\"architectures\": \[\"Qwen3ForCausalLM\"\]"),
        (("Qwen3ForCausalLM", "pooling", "none"), "say --convert embed or --convert classify"),
        (("Qwen3ForCausalLM", "generate", "classify"), "let tokens be the labels: --hf-overrides"),
        (("Qwen3ForCausalLM", "generate", "reward"), "Use --runner pooling"),
        (("Qwen3ForCausalLM", "poling"), "--runner poling: must be one of auto, generate, pooling$"),
        (("Qwen3ForCausalLM", "auto", "both"), "--convert both: must be one of auto, none, embed"),
    ],
)
def test_what_cannot_be(tmp_path: Path, arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(tmp_path, *arguments)


@pytest.mark.parametrize(
    ("architecture", "convert", "said"),
    [
        (
            "BertModel",
            "classify",
            "--convert classify changes nothing: BertModel keeps its own head, and will embed",
        ),
        ("BertForSequenceClassification", "embed", "; to embed, serve its trunk with --hf-overrides"),
        ("Qwen2ForRewardModel", "embed", "will give rewards"),
    ],
)
def test_a_model_that_pools_by_itself_keeps_its_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, architecture: str, convert: str, said: str
) -> None:
    assert resolve(tmp_path, architecture, "auto", convert) == ("pooling", "none", architecture)
    assert said in caplog.text


@pytest.mark.parametrize("fields", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_a_decoder_that_looks_ahead_cannot_generate(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="both directions"):
        resolve(tmp_path, "Gemma3ForCausalLM", **fields)
    assert resolve(tmp_path, "Gemma3TextModel", **fields)[:2] == ("pooling", "embed")


def test_stems() -> None:
    assert stem("Qwen3ForCausalLM") == "Qwen3"
    assert stem("GPT2LMHeadModel") == "GPT2"
    assert stem("SomethingNew") == "SomethingNew"
