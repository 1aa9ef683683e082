"""What Gemma 4 is refused, and checkpoints as they are published."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import assert_logits, load_ranks
from safetensors.torch import load_file, save_file
from tiny import hf_logits, tiny_checkpoint
from tiny_shapes import EXPERTS_BESIDE, SHARED_CACHES

from models.config import ConfigError, read_config
from models.loader import LoadOptions, load_model
from models.parallel.parallel import Parallel

PROMPT = random.Random(2).choices(range(5, 300), k=19)


def changed(folder: Path, **fields: object) -> Path:
    """The checkpoint with other fields of config.json; None takes a field away."""
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize("variant", [{}, SHARED_CACHES], ids=["keys as values", "shared caches"])
def test_heads_as_published_files_describe_them(variant: dict[str, object], tmp_path: Path) -> None:
    """They say `global_head_dim` and have keys and values also for layers that read another one's cache."""
    folder = tiny_checkpoint("Gemma4ForCausalLM", tmp_path, **variant)
    expected = hf_logits(folder, PROMPT)
    tensors = load_file(folder / "model.safetensors")
    if variant:
        layer = "model.layers.7.self_attn."
        tensors |= {f"{layer}{name}_proj.weight": torch.randn(64, 32) for name in ("k", "v")}
        tensors[f"{layer}k_norm.weight"] = torch.ones(32)
        save_file(tensors, folder / "model.safetensors")
    changed(folder, per_layer_config=None, global_head_dim=32, num_global_key_value_heads=1)
    assert_logits(folder, expected, PROMPT)


def test_ropes_are_those_of_transformers_where_config_json_has_none(tmp_path: Path) -> None:
    folder = tiny_checkpoint("Gemma4ForCausalLM", tmp_path)
    expected = hf_logits(folder, PROMPT)
    assert_logits(changed(folder, rope_parameters=None), expected, PROMPT)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_kv_shared_layers": 3}, "layer 1 must read the cache of a layer before the last 3"),
        ({**EXPERTS_BESIDE, "top_k_experts": None}, "needs 'num_experts', 'top_k_experts'"),
        ({"use_bidirectional_attention": "all"}, "is not served with attention in both directions"),
        ({"per_layer_config": {"1": {"head_dim": 0}}}, r"per_layer_config\[...\].head_dim"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, object], said: str, tmp_path: Path) -> None:
    folder = changed(tiny_checkpoint("Gemma4ForCausalLM", tmp_path), **fields)
    with pytest.raises(ConfigError, match=said):
        load_ranks(folder)


def test_layers_that_share_caches_are_in_one_stage(tmp_path: Path) -> None:
    folder = tiny_checkpoint("Gemma4ForCausalLM", tmp_path, **SHARED_CACHES)
    config = read_config(folder)
    with pytest.raises(ValueError, match=r"there are 8 layers, and .* have one \(the last 6 in one\)"):
        load_model(LoadOptions(config, folder, dtype=torch.float32, parallel=Parallel(stage=1, stages=4)))
    last = LoadOptions(config, folder, dtype=torch.float32, parallel=Parallel(stage=2, stages=3))
    assert len([*load_model(last).attention_layers()]) == 3


def test_layers_that_read_another_cache_have_none(tmp_path: Path) -> None:
    (model,) = load_ranks(tiny_checkpoint("Gemma4ForCausalLM", tmp_path, **SHARED_CACHES))
    shapes = [layer.cache_shape(1, 4) for layer in model.attention_layers()]
    near, far = (2, 1, 2, 4, 16), (2, 1, 2, 4, 32)
    assert shapes == [near, near, far, near, near]
