"""Transformers' code with our attention, by architectures that have pages of their own, too."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from drive import Driver, load_ranks, run_in_chunks
from safetensors.torch import load_file, save_file
from shape_files import read_shapes
from tiny import hf_logits, tiny_checkpoint
from torch import Tensor
from transformers import dynamic_module_utils

from models.config import read_config
from models.families.transformers_fallback import TransformersForCausalLM, UnsupportedModel, knows
from models.loader import LoadOptions, load_model
from models.model import CausalLM
from models.weight_slices import WeightsError

ARCHITECTURES = ["GPTNeoXForCausalLM", "CohereForCausalLM", "Starcoder2ForCausalLM"]
"""Untied and parallel sublayers; tied with scaled logits and norms of q and k; windows and biases."""

PROMPT = random.Random(1).choices(range(5, 300), k=23)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


def load(folder: Path, **options: object) -> CausalLM:
    config = read_config(folder)
    options = {"model_impl": "transformers", **options}
    return load_model(LoadOptions(config, folder, dtype=torch.float32, **options))


def assert_equal(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_it_is_the_fallback(folder: Path) -> None:
    assert isinstance(load(folder), TransformersForCausalLM)


@pytest.mark.parametrize("size", [1, 7])
def test_prompt_in_chunks(folder: Path, size: int) -> None:
    assert_equal(run_in_chunks(Driver([load(folder)]), 2, PROMPT, size), hf_logits(folder, PROMPT))


def test_bfloat16_is_near(folder: Path) -> None:
    ranks = load_ranks(folder, dtype=torch.bfloat16, model_impl="transformers")
    driver = Driver(ranks, dtype=torch.bfloat16)
    logits = driver.step({0: PROMPT})[0]
    assert logits.dtype == torch.float32
    assert torch.cosine_similarity(logits, hf_logits(folder, PROMPT), dim=-1).min() > 0.99


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "GptOssForCausalLM"])
def test_a_family_of_ours_on_request(architecture: str, tmp_path: Path) -> None:
    """Windows in every other layer, and soft-caps in attention and in the head, or sinks."""
    folder = tiny_checkpoint(architecture, tmp_path)
    model = load(folder, model_impl="transformers")
    assert isinstance(model, TransformersForCausalLM)
    assert_equal(run_in_chunks(Driver([model]), 0, PROMPT, 9), hf_logits(folder, PROMPT))


def test_dummy_weights_run(folder: Path) -> None:
    logits = Driver([load(folder, load_format="dummy")]).step({0: PROMPT})[0]
    assert logits.shape == (len(PROMPT), 320)
    assert logits.isfinite().all()


def test_overrides_of_the_config_reach_transformers(tmp_path: Path) -> None:
    folder = tiny_checkpoint("CohereForCausalLM", tmp_path)
    config = read_config(folder, {"logit_scale": 0.5})
    model = load_model(LoadOptions(config, folder, dtype=torch.float32, model_impl="transformers"))
    assert_equal(Driver([model]).step({0: PROMPT})[0], hf_logits(folder, PROMPT) * 0.5)


def test_progress_and_the_size_of_the_weights(folder: Path) -> None:
    reported: list[float] = []
    model = load(folder, report=reported.append)
    assert reported == sorted(reported)
    assert reported[-1] == 1.0
    loaded = sum(parameter.nbytes for parameter in model.parameters())
    assert loaded == pytest.approx((folder / "model.safetensors").stat().st_size, rel=0.05)


def test_weights_that_do_not_fit_are_named(folder: Path) -> None:
    config = read_config(folder, {"num_hidden_layers": 4})
    with pytest.raises(WeightsError, match=r"layers\.3\.\S+ is missing"):
        load_model(LoadOptions(config, folder, dtype=torch.float32, model_impl="transformers"))


def test_what_transformers_knows() -> None:
    assert knows("GPTNeoXForCausalLM")
    assert not knows("GPTNeoXForSequenceClassification")
    assert not knows("NoSuchForCausalLM")


CONFIG = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
UNSUPPORTED = read_shapes("unsupported")
"""What is wrong, and the fields of configs in which it is."""


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_refusals_give_the_reason(tmp_path: Path, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **UNSUPPORTED[message]}))
    with pytest.raises(UnsupportedModel, match=message):
        load(tmp_path, model_impl="transformers", trust_remote_code=True, load_format="dummy")


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Dots1ForCausalLM"])
def test_experts_are_joined_by_transformers_own_rules(architecture: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(architecture, tmp_path)
    tokens = list(range(10, 40))
    logits = Driver([load(folder, model_impl="transformers")]).step({0: tokens})[0]
    torch.testing.assert_close(logits, hf_logits(folder, tokens), rtol=0, atol=1e-4)


def test_experts_that_cannot_be_joined_are_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("MixtralForCausalLM", tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.block_sparse_moe.experts.3.w1.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"experts\.0\.w1\.weight and others cannot be brought into"):
        load(folder, model_impl="transformers")


CODE = """\
from transformers import Starcoder2Config, Starcoder2ForCausalLM

class HomeConfig(Starcoder2Config):
    model_type = "home"

class HomeForCausalLM(Starcoder2ForCausalLM):
    config_class = HomeConfig

    def forward(self, **kwargs):
        output = super().forward(**kwargs)
        output.logits = output.logits / 2
        return output
"""


@pytest.fixture
def home_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that brings its own code: StarCoder 2, but for halved logits."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tiny_checkpoint("Starcoder2ForCausalLM", tmp_path / "home_made")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "home",
        "architectures": ["HomeForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_home.HomeForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_home.py").write_text(CODE)
    return folder


def test_code_of_the_checkpoint_is_run_if_trusted(home_made: Path, tmp_path: Path) -> None:
    original = tiny_checkpoint("Starcoder2ForCausalLM", tmp_path / "original")
    logits = Driver([load(home_made, trust_remote_code=True)]).step({0: PROMPT})[0]
    assert_equal(logits, hf_logits(original, PROMPT) / 2)


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_code_of_the_checkpoint_is_refused_otherwise(home_made: Path, model_impl: str) -> None:
    with pytest.raises(ValueError, match="--trust-remote-code"):
        load(home_made, model_impl=model_impl)
