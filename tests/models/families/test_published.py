"""Well-known checkpoints by their own files, made small: each is served as what it is without any option."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from pooling_files import put_json
from shape_files import read_shapes
from tiny import write_tokenizer

from models.config import read_config
from models.conversion.conversion_choice import Conversion, resolve_conversion
from models.loader import LoadOptions, load_model
from models.pooling.config import PoolingConfig, read_pooling
from models.pooling.sentence_files import Dense
from models.pooling.task_heads import Merged

CONFIGS = read_shapes("published")
"""The config.json of well-known checkpoints, with sizes made small."""


@dataclass(frozen=True, kw_only=True)
class Published:
    name: str
    config: dict[str, Any]
    files: dict[str, object] = field(default_factory=dict)

    architecture: str
    """The architecture whose class is built."""
    convert: str = "none"
    causal: bool = False
    mode: str
    normalize: bool = True
    max_len: int
    """The most tokens of a text."""
    prompts: Sequence[str] = ()
    widths: Sequence[int] = ()
    """The widths of the projections after pooling."""
    activation: str | None = None
    """The activation of scores."""

    def __str__(self) -> str:
        return self.name


PUBLISHED = [Published(name=name, **fields) for name, fields in CONFIGS["served"].items()]


def put(folder: Path, config: dict[str, Any], files: dict[str, object]) -> None:
    for name, content in (files | {"config.json": config}).items():
        put_json(folder, name, content)


def resolve(
    folder: Path, overrides: dict[str, object] | None = None
) -> tuple[Conversion, PoolingConfig, Any]:
    """Load a checkpoint with dummy weights -> (its conversion, its pooling, the model)."""
    config = read_config(folder, overrides)
    conversion = resolve_conversion(config, folder)
    facts = read_pooling(folder, config, {})
    options = LoadOptions(
        config,
        folder,
        dtype=torch.float32,
        load_format="dummy",
        max_len=32,
        conversion=conversion,
        pooling=facts,
    )
    return conversion, facts, load_model(options)


@pytest.mark.parametrize("published", PUBLISHED, ids=str)
def test_a_checkpoint_is_taken_for_what_it_is(published: Published, tmp_path: Path) -> None:
    put(tmp_path, published.config, published.files)
    conversion, facts, model = resolve(tmp_path)
    assert (conversion.runner, conversion.convert) == ("pooling", published.convert)
    assert conversion.architecture == published.architecture
    assert model.causal == published.causal
    length = read_config(tmp_path).max_len
    assert min(length, facts.texts.max_len or length) == published.max_len
    assert list(facts.texts.prompts) == list(published.prompts)
    assert facts.texts.lower_case == published.name.startswith("bge-base")
    assert [step.out_features for step in facts.steps if isinstance(step, Dense)] == list(published.widths)
    scores = published.activation is not None
    assert model.pooler.tasks == ({"classify", "token_classify"} if scores else {"embed", "token_embed"})
    head = model.pooler.heads["classify" if scores else "embed"]
    assert isinstance(head.rows, Merged)
    assert head.rows.modes == (published.mode,)
    assert head.width == (1 if scores else 32)
    if scores:
        assert (facts.num_labels, facts.activation) == (1, published.activation)
    else:
        assert head.activates == published.normalize


def test_qwen3_reranker(tmp_path: Path) -> None:
    """The checkpoint generates unless options say what it was made for."""
    put(tmp_path, CONFIGS["qwen3"] | {"max_position_embeddings": 40960}, {})
    write_tokenizer(tmp_path)
    conversion, facts, model = resolve(tmp_path)
    assert (conversion.runner, conversion.architecture) == ("generate", "Qwen3ForCausalLM")
    assert model.pooler.tasks == {"embed", "token_embed"}
    said: dict[str, object] = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    conversion, facts, model = resolve(tmp_path, said)
    assert (conversion.runner, conversion.convert) == ("pooling", "classify")
    assert conversion.architecture == "Qwen3ForCausalLM"
    assert (facts.num_labels, facts.two_way, facts.activation) == (1, True, "sigmoid")
    assert model.pooler.tasks == {"classify", "token_classify"}
    assert model.pooler.heads["classify"].rows.modes == ("LAST",)
