"""Configs of hybrids: as they were published, and those whose sizes disagree."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from drive import Driver, load_ranks
from shape_files import read_shapes
from tiny import hf_logits, tiny_checkpoint

PROMPT = random.Random(2).choices(range(5, 300), k=9)


PUBLISHED = read_shapes("hybrids")
"""The fields that published files have, and those that they leave out."""


def change(folder: Path, fields: dict[str, object], without: Sequence[str] = ()) -> None:
    path = folder / "config.json"
    kept = {name: value for name, value in json.loads(path.read_text()).items() if name not in without}
    path.write_text(json.dumps(kept | fields))


@pytest.mark.parametrize("name", PUBLISHED)
def test_fields_of_published_files(name: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(name.partition(":")[0], tmp_path)
    expected = hf_logits(folder, PROMPT).log_softmax(-1)
    change(folder, **PUBLISHED[name])
    found = Driver(load_ranks(folder)).step({0: PROMPT})[0].log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "fields", "said"),
    [
        ("Lfm2ForCausalLM", {"layer_types": ["conv"]}, "'layer_types' must be conv or full_attention for"),
        ("Lfm2ForCausalLM", {"conv_L_cache": 4}, r"has the shape \[32, 1, 3\], not \[32, 1, 4\]"),
        ("Lfm2ForCausalLM", {"intermediate_size": 1, "block_auto_adjust_ff_dim": True}, "no features"),
        ("BambaForCausalLM", {"mamba_n_heads": 4}, "4 Mamba heads .* of 8 .* do not make the 64 features"),
        ("BambaForCausalLM", {"mamba_n_groups": 3}, "8 Mamba heads cannot be divided evenly into 3 groups"),
        ("BambaForCausalLM", {"mamba_d_state": 16}, "has the shape"),
        ("Mamba2ForCausalLM", {"n_groups": 3}, "8 Mamba heads cannot be divided evenly into 3 groups"),
        ("Mamba2ForCausalLM", {"state_size": 16}, "has the shape"),
        ("FalconH1ForCausalLM", {"mlp_bias": True}, "'mlp_bias' and factors of gates"),
        ("FalconH1ForCausalLM", {"hidden_act": "gelu"}, "'?hidden_act"),
        ("NemotronHForCausalLM", {"mamba_num_heads": 4}, "has the shape"),
        ("NemotronHForCausalLM", {"moe_latent_size": 16}, "has the shape|is missing"),
        ("NemotronHForCausalLM", {"layers_block_type": ["conv"] * 5}, "'layers_block_type' must be"),
        ("Qwen3NextForCausalLM", {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ("BambaForCausalLM", {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ("NemotronHForCausalLM", {"mamba_hidden_act": "gelu"}, "'?mamba_hidden_act"),
        ("MambaForCausalLM", {"hidden_act": "gelu"}, "'?hidden_act"),
    ],
)
def test_sizes_that_disagree_are_refused_before_weights_are_read(
    architecture: str, fields: dict[str, object], said: str, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(architecture, tmp_path)
    change(folder, fields)
    with pytest.raises(ValueError, match=said):
        load_ranks(folder)


@pytest.mark.parametrize("architecture", ["NemotronHForCausalLM", "KimiLinearForCausalLM"])
def test_a_head_beside_embeddings_that_are_said_to_be_tied(architecture: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(architecture, tmp_path)
    expected = hf_logits(folder, PROMPT).log_softmax(-1)
    change(folder, {"tie_word_embeddings": True})
    found = Driver(load_ranks(folder)).step({0: PROMPT})[0].log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_ranks_that_cannot_divide_groups_are_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("BambaForCausalLM", tmp_path, mamba_n_groups=2)
    with pytest.raises(ValueError, match="--tensor-parallel-size 4: 2 groups of Mamba heads"):
        load_ranks(folder, 4)
