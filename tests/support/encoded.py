"""Texts for encoders, and their hidden states: ours of many texts in one step, Hugging Face's of one text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.context import AdapterRows, ForwardContext, use_context
from worker.tables.adapter_rows import numbers_of

Text = Sequence[int]

_random = random.Random(1)
TEXTS: list[Text] = [_random.choices(range(5, 300), k=length) for length in (7, 1, 23, 3, 16, 40)]
"""Texts shorter and longer than the windows, whose lengths add up to no multiple of anything."""


def run(
    ranks: Sequence[Any],
    texts: Sequence[Text],
    seconds: Sequence[int] | None = None,
    device: str = "cpu",
    adapters: Sequence[int] = (),
) -> list[Tensor]:
    """Hidden states of each text, all packed into one step; second texts of pairs begin at `seconds`.

    `adapters`: the number of each text's adapter, or 0.
    """
    lengths = [len(text) for text in texts]
    types = None
    if seconds is not None:
        pairs = zip(lengths, seconds, strict=True)
        types = torch.cat([torch.arange(length) >= second for length, second in pairs]).long().to(device)
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    context = ForwardContext(
        positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
        query_starts=F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)),
        kv_lens=counts,
        block_table=torch.empty(len(lengths), 0, dtype=torch.int32, device=device),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
        block_size=1,
        query_lens_host=lengths,
        kv_lens_host=lengths,
        token_types=types,
    )
    ids = torch.tensor([token for text in texts for token in text], device=device)
    if adapters:
        given = zip(adapters, accumulate(lengths, initial=0), lengths, strict=False)
        runs = [(own, start, count) for own, start, count in given if own]
        words = torch.tensor(numbers_of(runs, len(ids)), dtype=torch.int32)
        context.adapters = AdapterRows(words[: len(ids)], words[len(ids) :].clone(), runs)

    def forward(model: Any) -> Tensor:
        assert model.attention_layers() == []
        with torch.inference_mode(), use_context(context):
            return model.forward(ids, context.positions)

    with ThreadPoolExecutor(len(ranks)) as pool:
        outputs = list(pool.map(forward, ranks)) if len(ranks) > 1 else [forward(ranks[0])]
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0])
    return list(outputs[0].split(lengths))


@cache
def hf_model(folder: Path, config_time: int, dtype: torch.dtype) -> nn.Module:
    """Load Hugging Face's model once a folder; `config_time` differs if a test has changed config.json."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model_class = getattr(transformers, name)
    return model_class.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.inference_mode()
def hf_hidden(
    folder: Path,
    text: Text,
    second: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    frequencies: Tensor | None = None,
) -> Tensor:
    """Hugging Face's hidden states [L, H]; the second text of a pair begins at `second`."""
    model: Any = hf_model(folder, (folder / "config.json").stat().st_mtime_ns, dtype)
    types = {} if second is None else {"token_type_ids": (torch.arange(len(text)) >= second).long()[None]}
    if frequencies is not None:
        model.rotary_emb.inv_freq = frequencies
    return model.base_model(torch.tensor([list(text)]), **types).last_hidden_state[0]


@torch.inference_mode()
def hf_logits(folder: Path, text: Text) -> Tensor:
    model: Any = hf_model(folder, (folder / "config.json").stat().st_mtime_ns, torch.float32)
    return model(torch.tensor([list(text)])).logits[0]


def assert_near(answers: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for answer, wanted in zip(answers, expected, strict=True):
        torch.testing.assert_close(answer, wanted, atol=1e-5, rtol=0)


def distance(answer: Tensor, expected: Tensor) -> float:
    return float((answer.float() - expected).norm() / expected.norm())


def rename(folder: Path, change: Callable[[str], str]) -> None:
    path = folder / "model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(path).items()}, path)


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path)
