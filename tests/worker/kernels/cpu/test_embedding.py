"""Embeddings and rotary angles of the C kernels against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from forms import FORMS, Shape
from kernel_levels import NAMES, table_of, use_threads

from models.ops import reference
from worker.kernels.cpu import quantized
from worker.kernels.cpu.operations import Table
from worker.kernels.cpu.packing import Packed


@pytest.fixture(params=NAMES)
def table(request: pytest.FixtureRequest) -> Table:
    torch.manual_seed(0)
    use_threads(request.param, 2)
    return table_of(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 67, 4000])
def test_embeddings_are_copied(table: Table, dtype: torch.dtype, width: int) -> None:
    weight, ids = torch.randn(40, width).to(dtype), torch.randint(40, (300,))
    for given in (ids, ids[:0], ids[::3]):
        assert torch.equal(table["embed"](given, weight), reference.embed(given, weight))
    apart = torch.randn(40, 2 * width).to(dtype)[:, :width]
    assert torch.equal(table["embed"](ids, apart), reference.embed(ids, apart))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_unknown_id_is_nan_and_changes_no_other_row(table: Table, dtype: torch.dtype) -> None:
    weight = torch.randn(5, 9).to(dtype)
    rows = table["embed"](torch.tensor([4, 5, 0, -1, 1 << 40]), weight)
    assert rows.isnan().all(1).tolist() == [False, True, False, True, True]
    assert torch.equal(rows[[0, 2]], weight[[4, 0]])


@pytest.mark.parametrize("pairs", [1, 20, 64])
def test_angles_are_exact_far_from_the_beginning(table: Table, pairs: int) -> None:
    positions = torch.cat([torch.arange(100), torch.tensor([1_000_003, 131_071])])
    frequencies = 10_000.0 ** -(torch.arange(pairs) / pairs)
    turned = (positions.float()[:, None] * frequencies).double()
    exact = torch.cat([turned.cos(), turned.sin()], -1) * 1.25
    found = table["angles"](positions, frequencies, 1.25)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-7)
    torch.testing.assert_close(found, reference.angles(positions, frequencies, 1.25), rtol=0, atol=4e-7)


def test_a_position_has_the_same_bits_in_every_batch(table: Table) -> None:
    positions, frequencies = torch.randperm(5000), torch.rand(32)
    whole = table["angles"](positions, frequencies, 1.0)
    for at in (0, 77, 4999):
        assert torch.equal(table["angles"](positions[at : at + 1], frequencies, 1.0)[0], whole[at])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_quantized_embeddings_are_widened(table: Table, name: str, dtype: torch.dtype) -> None:
    """Rows are those of the plain matrix, bit for bit, and logits come from the same bytes."""
    matrix = replace(FORMS[name](Shape(70, 720)), dtype=dtype)
    packed, ids = table["pack"](matrix, wide=True), torch.tensor([0, 69, 31, 32, 5, 5])
    assert type(packed) is Packed
    rows = table["embed"](ids, packed)
    assert torch.equal(rows, matrix.widened()[ids])
    assert table["embed"](torch.tensor([3, 70, -1]), packed).isnan().all(1).tolist() == [False, True, True]
    plain = quantized.table(None)
    assert torch.equal(plain["embed"](ids, plain["pack"](matrix, wide=True)), rows)
