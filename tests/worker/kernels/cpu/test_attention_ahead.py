"""Tokens of pictures that see all of their picture: attention with a table of last positions."""

import random
from itertools import pairwise
from typing import Any

import exact
import pytest
import torch
from by_pairs import by_pairs
from equal_bits import assert_same_bits
from kernel_levels import use_threads
from later import Later
from paged import assert_near, make_cache, make_step
from torch import Tensor

from models.ops import reference
from worker.kernels.cpu.operations import Table

transformers = Later("transformers")

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("threads")


def random_items(length: int) -> list[range]:
    """Pictures in a prompt of so many tokens: apart, for to transformers two in a row are one."""
    ends = sorted(random.sample(range(length + 1), 2 * random.randint(1, 4)))
    return [range(*pair) for pair in zip(ends[::2], ends[1::2], strict=True)]


def last_of(length: int, items: list[range]) -> Tensor:
    last = torch.arange(length, dtype=torch.int32)
    for item in items:
        last[item.start : item.stop] = item.stop - 1
    return last


def cuts_between(length: int, items: list[range]) -> list[int]:
    """Places to cut a prompt, none of them inside a picture."""
    inside = {place for item in items for place in range(item.start + 1, item.stop)}
    free = [place for place in range(1, length) if place not in inside]
    return [0, *sorted(random.sample(free, min(4, len(free)))), length]


def masks_of_transformers(family: str, length: int, items: list[range], window: int) -> dict[str, Tensor]:
    """The masks [length, length] of transformers' model for layers with a window and without."""
    modeling = getattr(getattr(transformers.models, family), f"modeling_{family}")
    config = getattr(transformers, f"{family.capitalize()}TextConfig")(
        sliding_window=window, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    config._attn_implementation = "eager"
    types = torch.zeros(1, length, dtype=torch.long)
    for item in items:
        types[:, item.start : item.stop] = 1
    ids = modeling.get_block_sequence_ids_for_mask(types, torch.device("cpu"))
    given = {"attention_mask": None, "cache": None, "position_ids": None, "block_sequence_ids": ids}
    masks = modeling.create_masks_for_vision_model(config, torch.zeros(1, length, 8), **given)
    return {kind: mask[0, 0] == 0 for kind, mask in masks.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_the_mask_is_that_of_transformers(table: Table, family: str, dtype: torch.dtype) -> None:
    """Gemma 4's pictures are seen both ways in layers with a window only."""
    for _ in range(6):
        length, window = random.randint(8, 330), random.randint(2, 90)
        items = random_items(length)
        step = make_step([length], [length], block_size=16)
        kv, q = make_cache(step, 2, 32, dtype), torch.randn(length, 4, 32).to(dtype)
        held = torch.arange(length)
        keys, values = kv[:, step.block_table[0, held // 16].long(), :, held % 16].unbind(1)
        masks = masks_of_transformers(family, length, items, window)
        for kind, limit in (("sliding_attention", window), ("full_attention", None)):
            ahead = last_of(length, items) if limit or family == "gemma3" else None
            heads = [x.transpose(0, 1)[None].double() for x in (q, keys, values)]
            expected = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=masks[kind], scale=0.2, enable_gqa=True
            )[0].transpose(0, 1)
            limits: dict[str, Any] = {"scale": 0.2, "window": limit, "last": ahead}
            assert_near(table["attention"](q, kv, step, **limits), expected)
            assert_near(reference.attention(q.float(), kv.float(), step, **limits), expected)


@by_pairs(dtype=DTYPES, softcap=[None, 5.0], window=[None, 1, 70, 1000], added=["", "sinks", "slopes"])
def test_equals_the_definition_with_every_limit(
    table: Table, dtype: torch.dtype, softcap: float | None, window: int | None, added: str
) -> None:
    """Rows with pictures beside others, and a picture of one token."""
    step = make_step([1, 150, 1, 70, 3], [20, 290, 400, 70, 9], block_size=16)
    last = step.positions.int()
    for first, stop in ((1, 40), (60, 61), (100, 151), (152, 222)):
        last[first:stop] = last[stop - 1]
    kv, q = make_cache(step, 2, 64, dtype), torch.randn(225, 6, 64).to(dtype)
    limits: dict[str, Any] = {"scale": 0.3, "window": window, "softcap": softcap, "last": last}
    if added:
        limits[added] = torch.rand(6)
    expected = exact.attention(q, kv, step, **limits)
    assert_near(reference.attention(q.float(), kv.float(), step, **limits), expected)
    assert_near(table["attention"](q, kv, step, **limits), expected)


@pytest.mark.parametrize(("dtype", "cached"), [*zip(DTYPES, DTYPES, strict=True), (DTYPES[1], torch.int8)])
def test_a_prompt_with_pictures_has_the_same_bits_however_it_is_cut_between_them(
    level: str, table: Table, dtype: torch.dtype, cached: torch.dtype
) -> None:
    for _ in range(4):
        length = random.randint(60, 700)
        items = random_items(length)
        whole = make_step([length], [length], block_size=16)
        kv, q = make_cache(whole, 2, 32, cached), torch.randn(length, 6, 32).to(dtype)
        last = last_of(length, items)
        limits: dict[str, Any] = {"scale": 0.3, "window": random.choice([None, 50])}
        at_once = table["attention"](q, kv, whole, last=last, **limits)
        use_threads(level, random.randint(1, 2))
        for start, stop in pairwise(cuts_between(length, items)):
            step = make_step([stop - start], [stop], block_size=16)
            step.block_table = whole.block_table
            ahead = last[start:stop] if any(start <= item.start < stop for item in items) else None
            out = table["attention"](q[start:stop], kv, step, last=ahead, **limits)
            assert_same_bits(out, at_once[start:stop])


def test_nothing_behind_the_last_position_is_read(table: Table) -> None:
    """The keys behind the tokens' last positions are NaN, in the same cache block too."""
    step = make_step([8], [100], block_size=16)
    kv, q = make_cache(step, 1, 32, torch.float32), torch.randn(8, 2, 32)
    limits: dict[str, Any] = {"scale": 0.3, "last": torch.full((8,), 99, dtype=torch.int32)}
    out = table["attention"](q, kv, step, **limits)
    assert out.isfinite().all()
    assert_near(out, exact.attention(q, kv, step, **limits))


def test_a_table_of_other_tokens_is_refused(table: Table) -> None:
    step = make_step([3], [9], block_size=16)
    kv, q = make_cache(step, 1, 32, torch.float32), torch.randn(3, 2, 32)
    with pytest.raises(ValueError, match="last"):
        table["attention"](q, kv, step, scale=0.1, last=torch.zeros(2, dtype=torch.int32))
