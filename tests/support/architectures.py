"""Every causal language model that transformers knows, made tiny: it runs as it does there, or it is refused.

Tiny configs are made by rule: sizes are replaced by the names of their fields, and a few families need more,
or have more in published checkpoints.
They cover what families do by default, or in published checkpoints, such as mixed kinds of layers.
"""

import dataclasses
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from drive import Driver
from shape_files import read_shapes
from tiny import VOCAB_SIZE, randomise
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from models.config import read_config
from models.families.attention_calls import UnsupportedModel
from models.loader import LoadOptions, load_model
from models.model import CausalLM

RUNS = "runs"

_DIFFERENCES = {"HrmTextForCausalLM": 2e-2}
"""Differences of logits of more than 1e-3: transformers' own ways of attention differ by 6e-3 there."""

_SHAPES = read_shapes("architectures")
_SIZE_OF = {name: int(size) for size, names in _SHAPES["sizes"].items() for name in names.split()}
_SWITCHES = _SHAPES["switches"]
"""Fields that are set where a family has them."""


def names() -> list[str]:
    """The architectures, each once, though several model types may share one."""
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return sorted({name for known in classes for name in ([known] if isinstance(known, str) else known)})


def tiny_config(architecture: str) -> PretrainedConfig:
    config_class = getattr(transformers, architecture).config_class
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    common = {"architectures": [architecture], "dtype": "float32"}
    return config_class(**_sizes(fields) | _switches(fields) | common | _SHAPES.get(architecture, {}))


def _sizes(fields: dict[str, Any]) -> dict[str, Any]:
    """Replaces numbers, and fills in what is None by default, but leaves lists of a number for each layer."""
    replaceable = (name for name, value in fields.items() if isinstance(value, int | None))
    sizes = {name: _SIZE_OF[name] for name in replaceable if name in _SIZE_OF}
    if "qk_rope_head_dim" in sizes:  # latent attention: no heads share keys
        sizes |= {"head_dim": sizes["qk_rope_head_dim"], "num_key_value_heads": sizes["num_attention_heads"]}
    return sizes


def _switches(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in _SWITCHES.items() if fields.get(name) is not None}


def outcome(architecture: str, folder: Path) -> str:
    """RUNS, or the sentence with which it is refused before weights are read.

    Raises if it runs and is wrong, or fails in another way.
    """
    try:
        config = tiny_config(architecture)
    except Exception as error:
        return f"no tiny config could be made of it: {' '.join(str(error).split())}"
    config.save_pretrained(folder)
    try:
        _load(folder, load_format="dummy")  # so that no model is made where the config is enough
        theirs = _make_weights(architecture, config, folder)
        ours = _load(folder)
    except UnsupportedModel as refusal:
        return str(refusal)
    _compare(ours, theirs, _DIFFERENCES.get(architecture, 1e-3))
    return RUNS


def _load(folder: Path, load_format: str = "auto") -> CausalLM:
    reported: list[float] = []
    config = read_config(folder)
    options = LoadOptions(
        config, folder, dtype=torch.float32, load_format=load_format, report=reported.append
    )
    try:
        return load_model(options)
    except UnsupportedModel:
        assert not reported, "weights were read before the model was refused"
        raise


def _make_weights(architecture: str, config: PretrainedConfig, folder: Path) -> PreTrainedModel:
    model_class = getattr(transformers, architecture)
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomise(model, seed=0, scale=0.3)
    model.save_pretrained(folder)
    return model.eval()


def _compare(ours: CausalLM, theirs: PreTrainedModel, most: float) -> None:
    """Two texts that share steps, cut into chunks that differ, against whole texts without a cache."""
    tokens = random.Random(1)
    first, second = (tokens.choices(range(5, VOCAB_SIZE), k=23) for _ in range(2))
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([first, second]), use_cache=False).logits
    driver = Driver([ours])
    parts: dict[int, list[Tensor]] = {0: [], 3: []}
    for of_first, of_second in ((7, 5), (7, 1), (7, 7), (1, 9), (1, 1)):
        chunks = {3: second[:of_second], 0: first[:of_first]}
        first, second = first[of_first:], second[of_second:]
        for row, logits in driver.step(chunks).items():
            parts[row].append(logits)
    found = torch.stack([torch.cat(parts[0]), torch.cat(parts[3])])
    torch.testing.assert_close(found, expected, atol=most, rtol=0)
