"""Experts by the C kernels: as specified, the same alone and in any batch, and for any number of ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from forms import FORMS, Shape, drawn
from kernel_levels import linear_table, table_of, use_threads
from torch import Tensor

from models.ops import expert_routing_ops
from models.ops.expert_routing_ops import Routing
from models.ops.tree_sum import add_in_pairs
from worker.kernels.cpu import torch_operations
from worker.kernels.cpu.experts import ExpertTable
from worker.kernels.cpu.operations import Table
from worker.kernels.cpu.quantization import SCHEMES

DTYPES = [torch.float32, torch.bfloat16]
EXPERTS, CHOSEN = 6, 3


class Layer:
    """Random experts of odd sizes, with biases, and the same in a table's own layout."""

    def __init__(self, dtype: torch.dtype, size: int = 67, inner: int = 40) -> None:
        self.gate_up = [torch.randn(2 * inner, size).to(dtype) / 8 for _ in range(EXPERTS)]
        self.down = [torch.randn(size, inner).to(dtype) / 8 for _ in range(EXPERTS)]
        self.biases = torch.randn(EXPERTS, 2 * inner).to(dtype), torch.randn(EXPERTS, size).to(dtype)

    def packed(self, table: Table, sections: int | None = None) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        collect: Any = table.get("collect_experts", tuple)
        gate_up = [table["pack"](matrix, gated=True) for matrix in self.gate_up]
        return collect(gate_up), collect([table["pack"](matrix, sections=sections) for matrix in self.down])

    def run(
        self,
        table: Table,
        given: tuple[Tensor, ...],
        kind: str = "silu",
        sections: int | None = None,
        **options: Any,
    ) -> Tensor:
        options |= {"gate_up_bias": self.biases[0], "down_bias": self.biases[1]}
        return table["experts"](*given, *self.packed(table, sections), kind, **options)

    def exact(self, given: tuple[Tensor, ...], kind: str) -> Tensor:
        """The result in float64, of inputs between gate and down that are rounded as the model's are."""
        x, ids, weights = given
        into, out_of = self.biases
        total = torch.zeros(len(x), len(self.down[0]), dtype=torch.float64)
        for token in range(len(x)):
            for number, share in zip(ids[token].tolist(), weights[token], strict=True):
                both = self.gate_up[number].double() @ x[token].double() + into[number].double()
                inner = expert_routing_ops.gated(both[None].float(), kind).to(x.dtype)[0].double()
                result = self.down[number].double() @ inner + out_of[number].double()
                total[token] += share.double() * result
        return total


def chosen(rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows, the experts of each, and their weights. The last expert is never chosen."""
    ids = torch.stack([torch.randperm(EXPERTS - 1)[:CHOSEN].sort().values for _ in range(rows)])
    return torch.randn(rows, size).to(dtype), ids.int(), torch.rand(rows, CHOSEN)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu", "clamped"])
def test_experts_are_as_specified(level: str, dtype: torch.dtype, kind: str) -> None:
    layer = Layer(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for rows in (1, 2, 5, 33, 90):
        given = chosen(rows, 67, dtype)
        for sections in (None, 4):
            found = layer.run(table_of(level), given, kind, sections, wide=True)
            assert found.dtype == torch.float32
            torch.testing.assert_close(
                found.double(), layer.exact(given, kind), rtol=tolerance, atol=tolerance
            )
            assert torch.equal(layer.run(table_of(level), given, kind, sections), found.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_experts_are_those_of_torch(level: str, dtype: torch.dtype, scheme: str) -> None:
    layer, given = Layer(dtype, inner=96), chosen(19, 67, dtype)
    found = layer.run(linear_table(level, scheme), given, wide=True)
    expected = layer.run(torch_operations.linear_operations(SCHEMES[scheme]), given, wide=True)
    difference = (found - expected).norm() / expected.norm()
    assert difference < (1e-4 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    level: str, dtype: torch.dtype, scheme: str | None
) -> None:
    table = linear_table(level, scheme)
    layer = Layer(dtype, inner=96)
    x, ids, weights = chosen(300, 67, dtype)
    together = layer.run(table, (x, ids, weights), sections=2, wide=True)
    for rows in ([0], [7], [299], [3, 200], list(range(40, 73))):
        alone = layer.run(table, (x[rows], ids[rows], weights[rows]), sections=2, wide=True)
        assert torch.equal(alone, together[rows]), rows
    use_threads(level, 1)
    assert torch.equal(layer.run(table, (x, ids, weights), sections=2, wide=True), together)


def of_form(name: str, input_bits: int) -> Callable[[int, int], Any]:
    """What makes a matrix of so many outputs and inputs."""
    if name == "GPTQ":
        options: Any = {"group": 128, "zeros": True, "dtype": torch.bfloat16, "input_bits": input_bits}
        return lambda outputs, inputs: drawn(outputs, inputs, **options)
    return lambda outputs, inputs: FORMS[name](Shape(outputs, inputs, torch.bfloat16, input_bits))


def formed(names: Sequence[str], input_bits: int) -> Layer:
    """Experts of these forms in turn, wide enough for whole runs of groups."""
    layer = Layer(torch.bfloat16, 256, 256)
    made = [of_form(names[number % len(names)], input_bits) for number in range(EXPERTS)]
    layer.gate_up, layer.down = [make(512, 256) for make in made], [make(256, 256) for make in made]
    return layer


@pytest.mark.parametrize("input_bits", [8, 16])
@pytest.mark.parametrize("name", [*FORMS, "GPTQ"])
def test_many_rows_of_an_expert_have_the_bits_of_few(level: str, name: str, input_bits: int) -> None:
    # Many rows of whole codes are multiplied in another way.
    table, layer = table_of(level), formed([name], input_bits)
    x, ids, weights = chosen(190, 256, torch.bfloat16)
    for many, few in ((190, [[189], list(range(9, 30))]), (40, [[7, 9]])):
        together = layer.run(table, (x[:many], ids[:many], weights[:many]), wide=True)
        for rows in few:
            alone = layer.run(table, (x[rows], ids[rows], weights[rows]), wide=True)
            assert torch.equal(alone, together[rows]), (many, rows)


@pytest.mark.parametrize("names", [["Q4_K"], ["mxfp4", "Q6_K"]])
def test_more_rows_than_are_computed_at_once(level: str, names: list[str]) -> None:
    table, layer = table_of(level), formed(names, 8)
    x, ids, weights = chosen(1200, 256, torch.bfloat16)
    together = layer.run(table, (x, ids, weights), wide=True)
    rows = [0, 1023, 1024, 1199]
    assert torch.equal(layer.run(table, (x[rows], ids[rows], weights[rows]), wide=True), together[rows])


def test_experts_of_different_forms_are_added_up(level: str) -> None:
    table, layer = table_of(level), formed(["Q6_K", "Q8_0", "Q4_K", "mxfp4", "GPTQ"], 8)
    for rows in (1, 7, 150):
        x, ids, weights = chosen(rows, 256, torch.bfloat16)
        together = layer.run(table, (x, ids, weights), wide=True)
        one_by_one = [
            layer.run(table, (x, ids[:, [at]].contiguous(), weights[:, [at]].contiguous()), wide=True)
            for at in range(CHOSEN)
        ]
        torch.testing.assert_close(together, sum(one_by_one), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_ranks_add_up_to_the_same_bits(level: str, dtype: torch.dtype, scheme: str | None) -> None:
    """Each has some inner features of all experts, and one of them the biases of downs."""
    inner = 256
    table = linear_table(level, scheme)
    layer, given = Layer(dtype, inner=inner), chosen(17, 67, dtype)
    whole = layer.run(table, given, sections=8, wide=True)
    into, out_of = layer.biases
    for ranks in (2, 4, 8):
        parts: list[Tensor] = []
        for rank in range(ranks):
            mine = slice(rank * inner // ranks, (rank + 1) * inner // ranks)
            piece = Layer(dtype)
            gates = [(matrix[:inner][mine], matrix[inner:][mine]) for matrix in layer.gate_up]
            piece.gate_up = [torch.cat(both) for both in gates]
            piece.down = [matrix[:, mine].contiguous() for matrix in layer.down]
            piece.biases = torch.cat([into[:, :inner][:, mine], into[:, inner:][:, mine]], dim=1), out_of
            matrices = piece.packed(table, 8 // ranks)
            bias = out_of if rank == 0 else None
            options = {"gate_up_bias": piece.biases[0], "down_bias": bias, "wide": True}
            parts.append(table["experts"](*given, *matrices, "silu", **options))
        assert torch.equal(add_in_pairs(parts), whole), ranks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_whole_experts_of_several_ranks_add_up(level: str, dtype: torch.dtype, scheme: str | None) -> None:
    """Matrices are given in any order. A row of which all choices lie elsewhere becomes zeros."""
    table = linear_table(level, scheme)
    layer = Layer(dtype, inner=96)
    for rows in (1, 3, 300):
        given = chosen(rows, 67, dtype)
        whole = layer.run(table, given, wide=True)
        parts: list[Tensor] = []
        for held in ([4, 0], [1], [5], [3, 2]):
            piece = Layer(dtype, inner=96)
            piece.gate_up, piece.down = (
                [of[number] for number in held] for of in (layer.gate_up, layer.down)
            )
            into, out_of = layer.biases
            piece.biases = into[held], out_of[held]
            places = torch.full((EXPERTS,), -1, dtype=torch.int32)
            places[held] = torch.arange(len(held), dtype=torch.int32)
            parts.append(piece.run(table, given, places=places, wide=True))
            here = torch.isin(given[1], torch.tensor(held)).any(-1)
            assert (parts[-1][~here] == 0).all()
        difference = (add_in_pairs(parts) - whole).abs().max() / whole.abs().max()
        assert difference < 1e-6
        last = given[0][-1:], given[1][-1:], given[2][-1:]
        assert torch.equal(piece.run(table, last, places=places, wide=True), parts[-1][-1:])


ROUTINGS = [
    Routing(experts=12, chosen=5),
    Routing(experts=12, chosen=1, normalised=False, factor=1.7),
    Routing(experts=12, chosen=12, least_sum=3.0),
    Routing(experts=12, chosen=3, scores="sigmoid", epsilon=1e-20, factor=2.5, groups=4, kept_groups=2),
    Routing(experts=12, chosen=5, normalised=False, factor=16.0, groups=4, kept_groups=2, summed_best=1),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_choices_are_as_specified(level: str, dtype: torch.dtype, routing: Routing) -> None:
    x, weight, bias = (torch.randn(size).to(dtype) for size in ((400, 67), (12, 67), (12,)))
    weight /= 8
    weight[5], bias[5] = weight[2], bias[2]  # a tie
    table = table_of(level)
    packed = table["pack"](weight, plain=True)
    for correction in (None, torch.randn(12) / 4):
        if correction is not None:
            correction[5] = correction[2]
        factors = torch.rand(routing.experts)
        ids, shares = table["route"](x, packed, bias, correction, routing, factors)
        expected_ids, expected = expert_routing_ops.route(x, weight, bias, correction, routing, factors)
        same = (ids == expected_ids).all(-1)
        assert same.sum() >= len(x) - 1  # scores may be a digit apart
        torch.testing.assert_close(shares[same], expected[same], rtol=1e-4, atol=1e-6)
        given = bias, correction, routing, factors
        alone = [table["route"](x[row : row + 1], packed, *given) for row in (0, 7, 399)]
        assert torch.equal(torch.cat([each[1] for each in alone]), shares[[0, 7, 399]])


def test_rows_that_are_no_numbers_choose_experts_that_there_are(level: str) -> None:
    table = table_of(level)
    packed = table["pack"](torch.randn(12, 67), plain=True)
    x = torch.full((2, 67), torch.nan)
    for routing in ROUTINGS:
        ids, _ = table["route"](x, packed, None, None, routing)
        assert ((ids >= 0) & (ids < 12)).all()
        assert (ids.diff() > 0).all()


def test_a_router_is_never_quantized(level: str) -> None:
    weight = torch.randn(12, 256)
    for name, scheme in SCHEMES.items():
        packed = linear_table(level, name)["pack"](weight, plain=True)
        assert torch.equal(packed, table_of(level)["pack"](weight))
        assert torch.equal(torch_operations.linear_operations(scheme)["pack"](weight, plain=True), weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_expert_is_added_by_its_gate(level: str, dtype: torch.dtype) -> None:
    x, rows, total = torch.randn(3, 9, 67).to(dtype).unbind()
    gate = torch.randn(67).to(dtype) / 8
    found = table_of(level)["add_gated"](x, rows, gate, total)
    expected = expert_routing_ops.add_gated(x, rows, gate, total)
    torch.testing.assert_close(found, expected)


def test_torch_computes_what_the_kernels_do_not_know(level: str) -> None:
    table, layer = table_of(level), Layer(torch.float16)
    given = chosen(5, 67, torch.float16)
    gate_up, _ = layer.packed(table)
    assert type(gate_up) is tuple
    found = layer.run(table, given)
    torch.testing.assert_close(found.double(), layer.exact(given, "silu"), rtol=1e-2, atol=1e-2)
    assert type(Layer(torch.float32).packed(table)[0]) is ExpertTable


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_portable_experts_are_as_specified(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, given = Layer(dtype), chosen(19, 67, dtype)
    found = layer.run(torch_operations.TABLE, given, sections=4)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), layer.exact(given, "silu"), rtol=tolerance, atol=tolerance)


def test_tensors_that_do_not_fit_each_other_are_refused(level: str) -> None:
    table, layer = table_of(level), Layer(torch.float32)
    gate_up, down = layer.packed(table)
    x, ids, weights = chosen(4, 67, torch.float32)

    def refused(*given: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match="do not fit each other"):
            table["experts"](*given, "silu", **options)

    refused(x[:, 1:], ids, weights, gate_up, down)
    refused(x, ids[:, 1:], weights, gate_up, down)
    refused(x, ids, weights, gate_up, table["collect_experts"](list(down)[1:]))
    refused(x, ids, weights, gate_up, down, down_bias=torch.randn(EXPERTS, 66))
    refused(x.bfloat16(), ids, weights, gate_up, down)
    with pytest.raises(ValueError, match="collect_experts"):
        table["collect_experts"]([*gate_up, *down])
    routing = Routing(experts=5, chosen=2)
    with pytest.raises(ValueError, match="route"):
        table["route"](x, table["pack"](torch.randn(6, 67), plain=True), None, None, routing)
