"""Models that pool: made from tiny checkpoints, and asked as a worker would."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from drive import Driver, load_ranks
from tiny import tiny_checkpoint, write_tokenizer
from torch import Tensor

from models.config import read_config
from models.conversion.conversion_choice import resolve_conversion
from models.model import ServedModel
from models.ops.pooling_ops import Segments
from models.pooling.config import read_pooling
from models.pooling.task_heads import Pieces, PoolBatch

PROMPTS = [random.Random(seed).choices(range(5, 300), k=length) for seed, length in enumerate((23, 1, 9, 14))]
NO, YES = 71, 200
"""Tokens whose logits are the scores of a classifier by tokens."""


@dataclass(frozen=True)
class Params:
    """The request for one sequence, with the defaults of worker.protocol.Pooling."""

    task: str = "embed"
    use_activation: bool | None = None
    dimensions: int | None = None
    skip: int = 0
    outputs: tuple[str, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    query: bool = False


@cache
def causal_checkpoint(architecture: str, folder: Path) -> Path:
    """A tiny checkpoint in a folder of its own below `folder`, written once."""
    return tiny_checkpoint(architecture, folder / architecture)


def sibling_checkpoint(architecture: str, source: str, folder: Path, **overrides: object) -> Path:
    """A checkpoint of another class of the same family, such as LlamaModel from LlamaForCausalLM."""
    generating = tiny_checkpoint(source, folder / "generating", **overrides)
    model_class = getattr(transformers, architecture)
    config = model_class.config_class.from_pretrained(generating, architectures=[architecture])
    model, report = model_class.from_pretrained(generating, config=config, output_loading_info=True)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name in report["missing_keys"]:  # the head, which the generating checkpoint does not have
            parameter = model.get_parameter(name)
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder / architecture)
    write_tokenizer(folder / architecture)
    return folder / architecture


def load_pooled(
    folder: Path,
    size: int = 1,
    *,
    runner: str = "auto",
    convert: str = "auto",
    overrides: Mapping[str, object] | None = None,
    pooler_config: Mapping[str, object] | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[ServedModel]:
    """The model as its ranks."""
    config = read_config(folder, overrides)
    return load_ranks(
        folder,
        size,
        dtype=dtype,
        overrides=overrides,
        conversion=resolve_conversion(config, folder, runner=runner, convert=convert),
        pooling=read_pooling(folder, config, pooler_config or {}),
    )


def pool(
    ranks: Sequence[ServedModel],
    sequences: Sequence[Sequence[int]],
    params: Params | Sequence[Params] = Params(),
    *,
    chunk: int | None = None,
) -> list[Tensor]:
    """The answer to each sequence, of all of them in one batch; `chunk` tokens of each in a step."""
    asked = [params] * len(sequences) if isinstance(params, Params) else list(params)
    dtype = next(ranks[0].parameters()).dtype
    driver = Driver(ranks, sequences=len(sequences), max_len=64, dtype=dtype)
    chunk = chunk or max(len(tokens) for tokens in sequences)
    parts: list[list[Tensor]] = [[] for _ in sequences]
    for start in range(0, max(len(tokens) for tokens in sequences), chunk):
        new = {row: tokens[start : start + chunk] for row, tokens in enumerate(sequences)}
        for row, hidden in driver.hidden({row: tokens for row, tokens in new.items() if tokens}).items():
            parts[row].append(hidden)
    hidden = [torch.cat(rows) for rows in parts]
    pooler = ranks[0].pooler
    needed = [
        rows[list(pooler.needed_positions(one, tokens))]
        for rows, one, tokens in zip(hidden, asked, sequences, strict=True)
    ]
    found = [pooler.counted_rows(one, tokens) for one, tokens in zip(asked, sequences, strict=True)]
    counted = {at: torch.tensor(list(rows)) for at, rows in enumerate(found) if rows is not None}
    with torch.inference_mode():
        segments = packed(needed, asked)
        return pooler(PoolBatch(torch.cat(needed), segments, asked, pieces_of(segments, asked), counted))


def pieces_of(segments: Segments, asked: Sequence[Any]) -> Pieces | None:
    """The pieces of sequences, if some have spans."""
    if not any(each.spans for each in asked):
        return None
    places: list[tuple[int, int, int]] = []
    for each, place in zip(asked, segments.on_host, strict=True):
        places += [(place[0], place[0] + one, place[0] + other) for one, other in each.spans] or [place]
    return Pieces(Segments(places, torch.tensor(places)), [len(each.spans) or 1 for each in asked])


def packed(rows: Sequence[Tensor], asked: Sequence[Any]) -> Segments:
    """The places of sequences one behind the other."""
    return Segments.packed([len(each) for each in rows], [each.skip for each in asked], torch.tensor)


@torch.inference_mode()
def hf_output(folder: Path, architecture: str, tokens: list[int]) -> Any:
    """The output for one sequence of Hugging Face's class of that name."""
    model = getattr(transformers, architecture).from_pretrained(folder, attn_implementation="eager")
    return model(torch.tensor([tokens]), use_cache=False)


def assert_near(answer: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(answer, expected, atol=1e-5, rtol=1e-5)
