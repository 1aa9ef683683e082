"""The text of tiny random composites has the logits of transformers' composite classes."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drive import assert_logits, load_ranks
from safetensors.torch import load_file, save_file
from shape_files import read_shapes
from tiny import randomise
from torch import Tensor

from models.composites import COMPOSITES
from models.config import read_config
from models.loader import LoadOptions, load_model
from models.parallel.parallel import Parallel
from models.registry import UnknownArchitecture
from models.weight_slices import WeightsError

PROMPT = random.Random(2).choices(range(5, 300), k=19)
_WINDOW = 6


_PARTS: dict[str, dict[str, Any]] = {
    name: fields for name, fields in read_shapes("composites").items() if name[0].isupper()
}


class Composite:
    """A tiny checkpoint of a composite, and what transformers makes of PROMPT with it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder = folder
        architecture = kind.partition(" ")[0]
        made: Any = getattr(transformers, architecture)
        parts = {"dtype": "float32", "architectures": [architecture], **_PARTS[kind]}
        model = made._from_config(made.config_class(**parts), attn_implementation="eager").eval()
        randomise(model, seed=0, scale=0.3)
        model.save_pretrained(folder)
        with torch.inference_mode():
            tokens = torch.tensor([PROMPT])
            self.expected: Tensor = model(input_ids=tokens, use_cache=False).logits[0].float()


@pytest.fixture(scope="module", params=_PARTS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Composite:
    return Composite(request.param, tmp_path_factory.mktemp("composite"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Composite:
    return Composite("Gemma3ForConditionalGeneration", tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Composite:
    return Composite("Mistral3ForConditionalGeneration", tmp_path_factory.mktemp("mistral"))


def rewritten(
    composite: Composite, folder: Path, rename: Callable[[str], str] = str, **fields: object
) -> Path:
    """Write the checkpoint with other names of tensors, and other fields of config.json."""
    config = json.loads((composite.folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(composite.folder / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_its_logits_are_those_of_transformers(built: Composite, ranks: int) -> None:
    assert built.expected.std() > 0.3
    assert_logits(built.folder, built.expected, PROMPT, ranks)


def as_on_the_hub(name: str) -> str:
    """The name that a tensor had before transformers 4.52."""
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.", 1)
    return name.removeprefix("model.")


def as_since(name: str) -> str:
    """The name that a tensor has since then, if it was saved under that name."""
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    if name.startswith("language_model.model."):
        return name.replace("language_model.model.", "model.language_model.", 1)
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


@pytest.mark.parametrize("rename", [as_on_the_hub, as_since])
@pytest.mark.parametrize("family", ["gemma", "mistral"])
def test_both_ways_of_naming_its_tensors_are_read(
    family: str, rename: Callable[[str], str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    composite: Composite = request.getfixturevalue(family)
    assert_logits(rewritten(composite, tmp_path, rename), composite.expected, PROMPT)


def test_every_composite_is_built() -> None:
    others = {"Gemma3nForConditionalGeneration"}  # transformers needs another package to build it
    others |= {"InternVLChatModel", "MiniCPMV"}  # transformers has other names for it, or no class
    others |= {"ColPaliForRetrieval", "ColQwen2ForRetrieval"}  # tests/worker/test_searched_pages.py
    others |= {"JinaVLForRanking"}  # tests/server/offline/test_picture_reranker.py
    others |= {"PaliGemmaForConditionalGeneration"}  # it needs its tower: tests/worker/test_whole_prompts.py
    others |= {"DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM"}  # tests/worker/test_document_models.py
    others |= {
        "Qwen2AudioForConditionalGeneration",
        "Qwen3ASRForConditionalGeneration",
        "VoxtralForConditionalGeneration",
    }  # test_heard_sounds.py
    assert {kind.partition(" ")[0] for kind in _PARTS} == set(COMPOSITES) - others


def test_the_log_says_how_much_is_not_read(built: Composite, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "models"):
        options = LoadOptions(read_config(built.folder), built.folder, dtype=torch.float32)
        load_model(options)
        of_others = Parallel(stage=1, stages=2)
        load_model(LoadOptions(options.config, built.folder, dtype=torch.float32, parallel=of_others))
    line = "text alone is served: 0.00 GiB of weights for images are not read"
    said = [record.getMessage() for record in caplog.records]
    assert [each for each in said if "text alone" in each] == [line]


def test_what_has_no_known_name_is_an_error(gemma: Composite, tmp_path: Path) -> None:
    def rename(name: str) -> str:
        return name.replace("multi_modal_projector", "audio_projector")

    folder = rewritten(gemma, tmp_path, rename)
    with pytest.raises(WeightsError, match=r"audio_projector.* has no place in the model"):
        load_ranks(folder)


def test_a_text_of_another_kind_is_refused_by_name(mistral: Composite, tmp_path: Path) -> None:
    text = json.loads((mistral.folder / "config.json").read_text())["text_config"]
    folder = rewritten(mistral, tmp_path, text_config={**text, "model_type": "qwen3"})
    served = "only that of 'mistral', 'ministral3' and 'mistral4' is served"
    with pytest.raises(UnknownArchitecture, match=f"model_type 'qwen3', and {served}"):
        load_ranks(folder)


@pytest.mark.parametrize("top", [True, False, None])
def test_a_head_of_its_own_is_used_whatever_the_top_level_says(
    mistral: Composite, tmp_path: Path, top: bool | None
) -> None:
    text = json.loads((mistral.folder / "config.json").read_text())["text_config"]
    text["tie_word_embeddings"] = False
    folder = rewritten(mistral, tmp_path, text_config=text, tie_word_embeddings=top)
    assert_logits(folder, mistral.expected, PROMPT)


def test_fields_that_gemmas_files_leave_out_have_the_values_of_transformers(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "text_config": {**text, "intermediate_size": 10240, "sliding_window": 1024},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = read_config(tmp_path)
    config.require()
    theirs = transformers.Gemma3TextConfig(**text)
    assert config.vocab_size == theirs.vocab_size
    assert config.num_heads == theirs.num_attention_heads
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == theirs.head_dim
    assert config.max_len == theirs.max_position_embeddings
    assert config.eos_token_ids == (1, 106)
