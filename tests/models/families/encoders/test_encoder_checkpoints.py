"""Checkpoints of encoders as they are found: older names, older configs, and limits of learned positions."""

import json
import re
from pathlib import Path

import pytest
import torch
from drive import load_ranks
from encoded import TEXTS, add_tensors, assert_near, hf_hidden, rename, run
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint

from models.config import ConfigError, read_config
from models.weight_slices import WeightsError


def test_trunks_with_and_without_their_name(tmp_path: Path) -> None:
    folder = tiny_checkpoint("BertModel", tmp_path)
    expected = [hf_hidden(folder, text) for text in TEXTS]
    rename(folder, lambda name: f"bert.{name}")
    assert_near(run(load_ranks(folder), TEXTS), expected)


def test_checkpoints_of_the_first_years(tmp_path: Path) -> None:
    """Their norms have TensorFlow's names, and constants and other heads lie among the weights."""
    folder = tiny_checkpoint("BertModel", tmp_path)
    expected = [hf_hidden(folder, text) for text in TEXTS]
    rename(folder, lambda name: re.sub("Norm.weight", "Norm.gamma", re.sub("Norm.bias", "Norm.beta", name)))
    extra = {
        "embeddings.position_ids": torch.arange(512)[None],
        "cls.predictions.bias": torch.zeros(7),
        "classifier.weight": torch.zeros(2, 32),
    }
    add_tensors(folder, extra)
    assert_near(run(load_ranks(folder), TEXTS), expected)


@pytest.mark.parametrize("architecture", ["BertModel", "RobertaModel"])
@pytest.mark.parametrize("change", [{}, {"pad_token_id": None}], ids=["left out", "null"])
def test_configs_without_a_padding_token(
    architecture: str, change: dict[str, object], tmp_path: Path
) -> None:
    """Positions of RoBERTa begin behind that token, which is 1 where nothing is said."""
    folder = tiny_checkpoint(architecture, tmp_path, pad_token_id=1)
    expected = [hf_hidden(folder, text) for text in TEXTS]
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["pad_token_id"]
    path.write_text(json.dumps(config | change))
    assert_near(run(load_ranks(folder), TEXTS), expected)


def test_what_has_no_place_is_still_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("BertModel", tmp_path)
    add_tensors(folder, {"encoder.layer.3.output.dense.weight": torch.zeros(32, 48)})
    with pytest.raises(WeightsError, match=r"encoder\.layer\.3\.output\.dense\.weight .* no place"):
        load_ranks(folder)


def test_gtes_own_config_and_names(tmp_path: Path) -> None:
    """The first checkpoints have them. GTE stretches positions in its own way, which a formula shows."""
    dim, theta, factor = 8, 20000.0, 8.0
    folder = tiny_checkpoint("GteModel", tmp_path)
    frequencies = (theta * factor) ** (-torch.arange(0, dim, 2) / dim) / factor ** (2 / dim)
    expected = [hf_hidden(folder, text, frequencies=frequencies) for text in TEXTS]
    rename(folder, lambda name: f"new.{name}")
    own = {
        "architectures": ["NewModel"],
        "model_type": "new",
        "rope_theta": theta,
        "rope_scaling": {"type": "ntk", "factor": factor},
        "position_embedding_type": "rope",
        "pack_qkv": True,
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | own | {"rope_parameters": None}))
    assert_near(run(load_ranks(folder), TEXTS), expected)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "qkv_proj" in name]:
        parts = tensors.pop(name).chunk(3)
        for letter, part in zip("qkv", parts, strict=True):
            tensors[name.replace("qkv_proj", f"{letter}_proj")] = part.clone()
    save_file(tensors, folder / "model.safetensors")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pack_qkv": False}))
    assert_near(run(load_ranks(folder), TEXTS), expected)


def test_modernberts_config_as_first_published(tmp_path: Path) -> None:
    folder = tiny_checkpoint(
        "ModernBertModel",
        tmp_path,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 3000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    )
    expected = [hf_hidden(folder, text) for text in TEXTS]
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["layer_types"], config["rope_parameters"]
    first = {"global_rope_theta": 3000.0, "local_rope_theta": 50.0, "global_attn_every_n_layers": 3}
    path.write_text(json.dumps(config | first))
    assert_near(run(load_ranks(folder), TEXTS), expected)


@pytest.mark.parametrize(
    ("architecture", "learned"),
    [("BertModel", 512), ("RobertaModel", 509), ("MPNetModel", 510), ("DistilBertModel", 512)],
)
def test_the_last_learned_position(architecture: str, learned: int, tmp_path: Path) -> None:
    """Positions of RoBERTa's kin begin after the row of the padding token, 2 here; MPNet takes 1 for it."""
    folder = tiny_checkpoint(architecture, tmp_path)
    assert read_config(folder).max_len == (509 if architecture == "MPNetModel" else learned)
    text = [token % 300 + 5 for token in range(learned)]
    assert_near(run(load_ranks(folder, max_len=learned), [text]), [hf_hidden(folder, text)])
    with pytest.raises(
        ValueError, match=f"learned {learned} positions, and cannot serve {learned + 1}: lower"
    ):
        load_ranks(folder, max_len=learned + 1)


def test_positions_that_are_no_places_are_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("BertModel", tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"position_embedding_type": "relative_key"}))
    with pytest.raises(ConfigError, match="'relative_key', but must be 'absolute'"):
        load_ranks(folder)
