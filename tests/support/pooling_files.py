"""The files of a checkpoint that say how it pools: written, and read by `read_pooling`."""

import json
from pathlib import Path
from typing import Any

from tiny import VOCAB_SIZE

from models.config import ModelConfig, read_config
from models.pooling.config import PoolingConfig, read_pooling

ST = "sentence_transformers.models"
CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
}


def put_json(folder: Path, name: str, content: object) -> None:
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
            put_json(folder, f"{path}/config.json" if path else "unused.json", config)
    put_json(folder, "modules.json", listed)


def config_of(folder: Path, **fields: object) -> ModelConfig:
    put_json(folder, "config.json", CONFIG | fields)
    return read_config(folder)


def read(folder: Path, asked: dict[str, object] | None = None, **fields: Any) -> PoolingConfig:
    """The pooling of a checkpoint: `fields` are of its config.json, `asked` is `--pooler-config`."""
    return read_pooling(folder, config_of(folder, **fields), asked or {})
