from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint's folder with all that this floor reads of it, which is config.json."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 50,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
