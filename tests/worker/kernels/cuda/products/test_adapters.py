"""Adapters by Triton, against the reference: rows in any company, and adapters that take others' places."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from interpreted import DEVICE
from torch import Tensor

from models.context import AdapterRows
from models.ops import SPECIFIED
from models.ops.lora_ops import Adaptable, AdapterStore, Block, LayerAdapter
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.operations import cuda_operations
from worker.tables.adapter_rows import Run, numbers_of

OPERATIONS = cuda_operations(Card(90, 4))
INPUTS, OUTPUTS = 1100, 150  # two sections of inputs, and tiles that hold the end of one piece and another


def made(rank: int, *, dora: bool = False) -> LayerAdapter:
    """An adapter of a layer of two modules, of which the second ends within a tile."""
    a = torch.randn(2 * rank, INPUTS) / INPUTS**0.5
    blocks = [Block(0, 0, torch.randn(100, rank)), Block(100, rank, torch.randn(50, rank))]
    factor, shift = (torch.rand(OUTPUTS) + 0.5, torch.randn(OUTPUTS)) if dora else (None, None)
    return LayerAdapter(a, blocks, factor, shift)


def stores(weight: Tensor, adapters: Sequence[LayerAdapter], in_step: int, rank: int) -> list[AdapterStore]:
    """The store of these kernels and the reference's, each with two layers of which the last is changed."""
    layers = [Adaptable(weight, INPUTS, OUTPUTS, 2, 2)] * 2
    opened = [table["hold_adapters"](layers, 8, rank, in_step) for table in (OPERATIONS, SPECIFIED)]
    for store in opened:
        for number, adapter in enumerate(adapters, 1):
            store.enter(number, store.prepare([(1, adapter)]))
    return opened


def rows_of(runs: list[Run], tokens: int) -> AdapterRows:
    words = torch.tensor(numbers_of(runs, tokens), dtype=torch.int32, device=DEVICE)
    return AdapterRows(words[:tokens], words[tokens:], runs)


def computed(table: Any, store: AdapterStore, x: Tensor, given: Sequence[Any], rows: AdapterRows) -> Tensor:
    store.bring(number for number, _, _ in rows.host)
    added = table["lora"](x, store.layers[1], rows)
    name = "linear" if len(given) == 2 else "gated_linear"
    return table[name](x, *given, added=added)


@pytest.mark.parametrize(
    ("dtype", "rank", "dora", "gated"),
    [
        (torch.float32, 1, False, False),
        (torch.float32, 40, True, False),
        (torch.bfloat16, 16, True, True),
    ],
)
def test_rows_have_what_the_reference_gives_them(
    dtype: torch.dtype, rank: int, dora: bool, gated: bool
) -> None:
    x, weight = torch.randn(21, INPUTS).to(dtype), (torch.randn(OUTPUTS, INPUTS) / 30).to(dtype)
    bias = torch.randn(OUTPUTS).to(dtype)
    x, weight, bias = x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE)
    own, plain = stores(weight, [made(rank, dora=dora), made(max(1, rank // 2))], 2, rank)
    rows = rows_of([(1, 0, 3), (2, 3, 1), (1, 5, 2), (2, 15, 6)], 21)
    given = (weight, bias, "silu") if gated else (weight, bias)
    out = computed(OPERATIONS, own, x, given, rows)
    expected = computed(
        SPECIFIED, plain, x.cpu(), [each.cpu() if isinstance(each, Tensor) else each for each in given], rows
    )
    if dtype == torch.float32:
        torch.testing.assert_close(out.cpu(), expected, atol=1e-4, rtol=1e-4)
    else:
        torch.testing.assert_close(out.cpu(), expected, atol=0.15, rtol=0.05)
    name = "gated_linear" if gated else "linear"
    without = OPERATIONS[name](x, *given)
    assert torch.equal(out[[4, *range(7, 15)]], without[[4, *range(7, 15)]])


def are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two results have the same bits. The interpreter multiplies by numpy, whose sums differ by where
    a row stands: there they are near."""
    return torch.equal(one, other) if DEVICE.type == "cuda" else torch.allclose(one, other, atol=1e-5)


def test_a_row_has_the_same_bits_in_any_company_and_after_others_took_its_place() -> None:
    x, weight = torch.randn(70, INPUTS, device=DEVICE), torch.zeros(OUTPUTS, INPUTS, device=DEVICE)
    store, _ = stores(weight, [made(24), made(5), made(24)], 2, 24)
    together = computed(OPERATIONS, store, x, (weight, None), rows_of([(1, 3, 20), (2, 40, 30)], 70))
    alone = computed(OPERATIONS, store, x[16:17], (weight, None), rows_of([(1, 0, 1)], 1))
    other = computed(OPERATIONS, store, x[40:42], (weight, None), rows_of([(3, 0, 1), (2, 1, 1)], 2))
    again = computed(OPERATIONS, store, x[3:5], (weight, None), rows_of([(1, 0, 2)], 2))
    assert are_same(together[16], alone[0])
    assert are_same(together[41], other[1])
    assert are_same(together[3:5], again)
    assert not torch.equal(together[40], other[0])
    assert not together[23:40].any()
    with pytest.raises(ValueError, match="a step has 3 adapters, and there is room for 2"):
        store.bring([1, 2, 3])
    store.drop(1)
    assert not computed(OPERATIONS, store, x[3:5], (weight, None), rows_of([(1, 0, 2)], 2)).any()


def test_embeddings_have_what_the_reference_adds_in_any_company() -> None:
    known, size, tokens = 40, 150, 20
    layers = [Adaptable(torch.zeros(known, size, device=DEVICE), known, size, 1, 2, embeds=True)]
    factor, shift = torch.rand(size) + 0.5, torch.randn(size)
    adapters = [
        LayerAdapter(torch.randn(70, known), [Block(0, 0, torch.randn(size, 70))]),
        LayerAdapter(torch.randn(3, known), [Block(64, 0, torch.randn(86, 3))], factor, shift),
    ]
    ids, rows = torch.randint(known, (tokens,)), rows_of([(1, 1, 3), (2, 4, 9), (1, 15, 2)], tokens)
    embedded = torch.randn(tokens, size)

    def adapt(table: Any, first: int, last: int, rows: AdapterRows) -> Tensor:
        store: AdapterStore = table["hold_adapters"](layers, 8, 70, 2)
        for number, adapter in enumerate(adapters, 1):
            store.enter(number, store.prepare([(0, adapter)]))
        store.bring([1, 2])
        own = embedded[first:last].clone().to(DEVICE), ids[first:last].to(DEVICE)
        return table["adapt_embeddings"](*own, store.layers[0], rows).cpu()

    found = adapt(OPERATIONS, 0, tokens, rows)
    torch.testing.assert_close(found, adapt(SPECIFIED, 0, tokens, rows), atol=1e-4, rtol=1e-4)
    assert are_same(found[11:13], adapt(OPERATIONS, 11, 13, rows_of([(2, 0, 2)], 2)))
    assert torch.equal(found[13:15], embedded[13:15])


def test_an_adapter_of_the_largest_rank_has_room() -> None:
    store, _ = stores(torch.zeros(OUTPUTS, INPUTS), [], 1, 320)
    assert store.prepare([(0, made(320, dora=True)), (1, made(320, dora=True))]).nbytes > 0
    with pytest.raises(ValueError, match=r"an adapter has \d+ bytes, and there is room for"):
        store.prepare([(0, made(400)), (1, made(400))])
