"""Proves on a card the kernels that a model calls, before it is loaded; torch does what is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.context import AdapterRows, ForwardContext, StateRows
from models.ops import SPECIFIED
from models.ops.attention_inputs import HeadPrep
from models.ops.lora_ops import Adaptable, AdapterStore, Block, LayerAdapter
from models.state_rows import StateRow, state_columns
from worker.kernels.compare_with_reference import TOLERANCE, Case, cases_by_type
from worker.kernels.cuda.capabilities import COUNTERS, Card
from worker.kernels.cuda.draw_kernel import draws_right
from worker.kernels.cuda.fused.largest import finds_largest
from worker.kernels.cuda.launch import joining
from worker.kernels.cuda.operations import cuda_operations
from worker.kernels.operations_used import Uses

logger = logging.getLogger(__name__)

DRAW = "draw"
"""The name of the draw of tokens among operations that are proved."""


def prove(
    card: Card,
    target: torch.device,
    dim: int,
    dtype: torch.dtype,
    uses: Uses | None,
    lost: Callable[[Exception], bool],
) -> list[str]:
    """The names of operations that compute something else than the reference on this card, or fail.

    `dim`, `dtype`: the width of the model's heads and its number type; `uses`: what it asks of operations,
    None for all of them. Raises ValueError if the card is `lost`, so that nothing else can be computed.
    """
    table = cuda_operations(card)
    proofs: list[tuple[str, Callable[[], bool]]] = [
        (case.name, partial(case.agrees, table, SPECIFIED))
        for case in cases_on(target, dim, dtype, uses)
        if case.name in table
    ]
    found = set[str]()
    by_hand = (DRAW, partial(draws_right, target)), ("fused_layer", partial(finds_largest, target))
    for name, agrees in [*proofs, *by_hand]:
        try:
            if agrees():
                continue
            logger.error("%s differs on this card from what it should compute: torch does it", name)
        except Exception as error:
            problem = str(error).strip().partition("\n")[0]
            if lost(error):
                raise ValueError(
                    f"the card failed while the kernel for {name} was being proved, and must be opened anew "
                    f"({problem}): install the torch that this program asks for, with the Triton that it "
                    "brings, or pass --device cpu"
                ) from error
            logger.error("%s fails on this card, so torch does it: %s", name, problem)
        found.add(name)
    return sorted(found)


def agree(own: Collection[str], names: Iterable[str], minimum: Callable[[int], int]) -> set[str]:
    """Return those of `names` that torch does on all ranks: they are wrong on some. `own`: on this one."""
    if minimum(int(not own)):
        return set()
    return {name for name in sorted(names) if not minimum(int(name not in own))}


def cases_on(target: torch.device, dim: int, dtype: torch.dtype, uses: Uses | None = None) -> list[Case]:
    """The cases on a device in a number type. `uses`: what they are to prove; None: all operations."""
    made = torch.Generator().manual_seed(1)
    own = cases_by_type(dim, target, dtype)[dtype] + [
        each.moved(target) for each in _further_cases(made, dtype, dim)
    ]
    return own if uses is None else uses.choose(own)


def _further_cases(made: torch.Generator, dtype: torch.dtype, dim: int) -> list[Case]:
    """An activation behind a product, and long steps of attention and of states, by kernels of their own."""

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made).to(dtype)

    tolerance = TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])
    product, heads = (values(4, 67), values(102, 67)), (values(41, 6, dim), values(2, 11, 2, 64, dim))
    step, rates, states = _long_step(), -values(4).float().abs(), values(3, 4, 24, 40).float()
    x, gates, numbers = values(41, 2 * 2 * 24 + 4 * 40), values(41, 8), values(4).float()
    scanned = (x, gates[:, :4], rates, numbers, numbers, (0.0, 2.0), states, step, 2)
    adapter = LayerAdapter(values(3, 67).float(), [Block(0, 0, values(102, 3).float())])
    return [
        _Adapted("lora", (*product, adapter), tolerance=tolerance),
        _AdaptedEmbeddings("adapt_embeddings", (values(67, 102), adapter), tolerance=tolerance),
        Case("linear", product, {"kind": "gelu"}, tolerance=tolerance),
        Case("attention", (*heads, step), {"scale": 0.2}, tolerance=tolerance),
        Case("gated_delta", (x, gates, rates, numbers, states, step, 2), tolerance=tolerance),
        Case("selective_scan", scanned, tolerance=tolerance),
        *_joined_cases(values, dim, tolerance),
    ]


def _joined_cases(values: Callable[..., Tensor], dim: int, tolerance: float) -> list[Case]:
    """The joined kernels of steps of few rows, of which each may be split; the last joins splits of keys."""
    step, kv = _few_rows(), values(2, 11, 2, 64, dim)
    angles, head_norms = values(2, dim - dim % 2).float(), (values(dim), values(dim))
    x, norm, out = values(2, 300), values(300), values(2, 70)
    heads, gates, down = values(10 * dim, 300) / 16, values(140, 300) / 16, values(70, 300) / 16
    bias, prep = values(10 * dim), HeadPrep(angles, *head_norms, 1e-5)
    given = [
        Case("angles", (step.positions * 1000, values(20).float(), 0.5)),
        Case("project_heads", (x, norm, 1e-5, heads, kv, step, None, HeadPrep(angles))),
        Case("project_heads", (x, norm, 1e-5, heads, kv, step, bias, prep)),
        Case("project_gates", (x, norm, 1e-5, gates, "silu", values(140))),
        Case("add_product", (x, down, out)),
        Case("add_product", (x, down, out, values(70))),
    ]
    cases: list[Case] = [_Joined(each.name, each.arguments, tolerance=tolerance) for each in given]
    return [*cases, _JoinedAttention("fused_layer", (values(2, 6, dim), kv, step), tolerance=tolerance)]


class _Joined(Case):
    """A joined kernel, whose programs count themselves."""

    def compute(self, table: Mapping[str, Callable[..., Any]]) -> Any:
        with joining(torch.zeros(COUNTERS, dtype=torch.int32, device=self.arguments[0].device)):
            return super().compute(table)


class _JoinedAttention(_Joined):
    """Attention as joined layers call it."""

    def compute(self, table: Mapping[str, Callable[..., Any]]) -> Any:
        attention = _Joined("attention", self.arguments, {"scale": 0.2})
        return attention.compute(table)


class _Adapted(Case):
    """A product with an adapter of two of its four rows."""

    def compute(self, table: Mapping[str, Callable[..., Any]]) -> Tensor:
        x, weight, adapter = self.arguments
        matrix = table["pack"](weight)
        layer = Adaptable(matrix, weight.shape[1], len(weight), scopes=1, pieces=1)
        store, rows = _adapt(table, layer, adapter)
        return table["linear"](x, matrix, added=table["lora"](x, store.layers[0], rows))


class _AdaptedEmbeddings(Case):
    """The embeddings of four tokens, of which two have an adapter."""

    def compute(self, table: Mapping[str, Callable[..., Any]]) -> Tensor:
        weight, adapter = self.arguments
        layer = Adaptable(weight, len(weight), weight.shape[1], scopes=1, pieces=1, embeds=True)
        store, rows = _adapt(table, layer, adapter)
        ids = torch.tensor([3, 0, 8, 8]).to(weight.device)
        return table["adapt_embeddings"](weight[ids], ids, store.layers[0], rows)


def _adapt(
    table: Mapping[str, Callable[..., Any]], layer: Adaptable, adapter: Any
) -> tuple[AdapterStore, AdapterRows]:
    """A store of a layer and its one adapter, which the middle two of four rows have."""
    store: AdapterStore = table["hold_adapters"]([layer], 1, len(adapter.a), 1)
    store.enter(1, store.prepare([(0, adapter)]))
    store.bring([1])
    numbers = torch.tensor([0, 1, 1, 0], dtype=torch.int32).to(layer.weight.device)
    return store, AdapterRows(numbers, numbers[:0], [(1, 1, 2)])


def _few_rows() -> ForwardContext:
    """A step of two sequences that decode, in blocks of 64 tokens; the keys of one are split."""
    return ForwardContext(
        positions=torch.tensor([599, 19]),
        query_starts=torch.arange(3, dtype=torch.int32),
        kv_lens=torch.tensor([600, 20], dtype=torch.int32),
        block_table=torch.tensor([[*range(10)], [10] * 10], dtype=torch.int32),
        slot_mapping=torch.tensor([599, 640 + 19]),
        block_size=64,
        query_lens_host=[1, 1],
        kv_lens_host=[600, 20],
    )


def _long_step() -> ForwardContext:
    """A step with a prompt and a sequence that decodes, whose keys are split, in blocks of 64 tokens."""
    rows = [StateRow(0, 0, ((20, 1),)), StateRow(2, 2)]
    positions = torch.cat([torch.arange(40), torch.tensor([599])])
    return ForwardContext(
        positions=positions,
        query_starts=torch.tensor([0, 40, 41], dtype=torch.int32),
        kv_lens=torch.tensor([40, 600], dtype=torch.int32),
        block_table=torch.tensor([[10] * 10, [*range(10)]], dtype=torch.int32),
        slot_mapping=torch.cat([640 + torch.arange(40), torch.tensor([599])]),
        states=StateRows(torch.tensor(state_columns(rows), dtype=torch.int32), rows),
        block_size=64,
        query_lens_host=[40, 1],
        kv_lens_host=[40, 600],
    )
