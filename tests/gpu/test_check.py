"""`make gpu-check` where there is no card: it says so; and its measurements, made small on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from latent import measure_draws, measure_latent
from latent_sizes import Sizes
from measures import Ceilings, Shape, measure_ceilings, measure_model, measure_texts
from products import measure_experts, measure_products, measure_rounding, measure_small_cache
from steps import measure_steps

from models import ops
from worker.sampling.draw import draw_fully

CPU = torch.device("cpu")
TINY = Shape("tiny", 64, 96, 2, 4, 2, vocabulary=320, head_dim=16)
CEILINGS = Ceilings(1e12, 1e14)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so() -> None:
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("check.py"))],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert (run.returncode, run.stderr) == (2, "")
    assert run.stdout == "gpu-check: torch finds no CUDA device here, so nothing was checked\n"


def test_models_are_measured() -> None:
    found = list(measure_model(TINY, CPU, CEILINGS, rows=(1, 3), prompts=(40,), length=20, steps=3))
    assert [result.name for result in found] == [
        "tiny decoding, 1 rows, likeliest",
        "tiny decoding, 1 rows, drawn",
        "tiny decoding, 3 rows, likeliest",
        "tiny decoding, 3 rows, drawn",
        "tiny prompt of 40",
    ]
    assert all(result.value > 0 and result.share for result in found)


def test_steps_are_compared_with_the_same_work_as_it_comes() -> None:
    found = list(measure_steps(CPU, CEILINGS, TINY, steps=4))
    compared = [result for result in found if result.name.startswith("graphs ") and not result.value]
    assert [(result.text, result.wrong) for result in compared] == [("the same bits", 0)] * 3
    assert [result.name for result in found[-2:]] == [
        "graphs of a prompt of 128, to its token",
        "a prompt of 128, to its token",
    ]


def test_texts_are_measured() -> None:
    names = [result.name for result in measure_texts(TINY, CPU, CEILINGS, texts=2, length=9)]
    assert names == ["tiny embeddings, 2 x 9", "tiny embeddings, 1 x 32"]


def test_products_and_experts_are_measured() -> None:
    operations = ops.SPECIFIED
    found = list(measure_products(operations, CPU, CEILINGS, side=128))
    found += measure_experts(operations, CPU, CEILINGS, size=32, inner=32, counts=(1, 3))
    found += measure_small_cache(operations, CPU, CEILINGS, torch.float8_e4m3fn, sizes=((2, 70),))
    names = [result.name for result in found]
    assert len(names) == len(set(names)) == 4 * 5 + 2 * 2 + 1
    assert names[1] == "product, 4 bits, groups of 128, 1 rows"
    assert names[-1] == "decoding, 2 x 70, float8_e4m3fn"
    assert all(result.value > 0 and result.share for result in found)


def test_latent_attention_and_draws_are_measured() -> None:
    attend = ops.SPECIFIED["latent_attention"]
    sizes = (Sizes(2, 16, 4, 8, 8), Sizes(4, 16, 4, 8, 8))
    found = list(measure_latent(attend, CPU, CEILINGS, sizes, decoding=((2, 70),), prompts=(9,)))
    assert [result.name for result in found] == [
        "latents, 2 heads, 2 x 70",
        "latents, 2 heads, prompt of 9",
        "latents, 4 heads, 2 x 70",
        "latents, 4 heads, prompt of 9",
    ]
    drawn = list(measure_draws(draw_fully, CPU, CEILINGS, rows=(1, 2), width=300))
    assert len({result.name for result in drawn}) == len(drawn) == 2 * 2 * 3
    assert drawn[0].name == "draw, 1 rows, sharp, no filter"
    assert all(result.value > 0 and result.share for result in found + drawn)


def test_rounding_is_compared_with_inputs_of_16_bits() -> None:
    linear = ops.SPECIFIED["linear"]
    ways = {"16 bits": linear, "8 bits": lambda x, matrix: linear(x * 1.03, matrix), "wrong": lambda x, _: -x}
    found = list(measure_rounding(ops.SPECIFIED["pack"], ways, CPU, CEILINGS, side=128, counts=(1, 3)))
    assert [result.name for result in found[:2]] == [
        "e4m3, rows, 16 bits, 1 rows",
        "e4m3, rows, 8 bits, 1 rows",
    ]
    assert len(found) == 2 * 2 * 3
    assert [result.wrong for result in found] == [0, 0, 1] * 4
    assert all("differs by" in result.text for result in found[1::3])


def test_ceilings_are_positive() -> None:
    found = measure_ceilings(CPU, numbers=1000, side=16)
    assert found.bytes_per_second > 0
    assert found.operations_per_second > 0
