"""Compares the kernels with the reference when they are loaded: once, with small tensors, on this machine.

Compilers and virtual machines have been wrong before, and a slow answer is better than a false one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from models.context import ForwardContext, StateRows
from models.ops import SPECIFIED, encoder_ops, latent_ops
from models.ops.attention_inputs import HeadPrep
from models.ops.block_codes import BitPlane
from models.ops.expert_routing_ops import WITHOUT_GATES, Routing
from models.ops.grouped_matrix import Factors, Grouped
from models.ops.pooling_ops import Segments
from models.pooling.pooling_modes import MERGERS
from models.state_rows import NOWHERE, StateRow, state_columns
from models.weight_coding import E2M1, E4M3, IQ4, NF4, WHOLE

HEAD_DIM = 40
"""The width of heads with which a CPU's kernels are compared: no multiple of a vector."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
_WRITTEN = {
    "rotary_and_cache": 3,
    "project_heads": 4,
    "latent_attention": 3,
    "choose_tokens": 3,
    "causal_conv": 3,
    "gated_delta": 4,
    "channel_delta": 5,
    "selective_scan": 6,
    "channel_scan": 7,
}
"""Operations that write to a cache or to states, with the number of that argument."""


def wrong(
    table: Mapping[str, Callable[..., Any]],
    specified: Mapping[str, Callable[..., Any]] = SPECIFIED,
    target: torch.device | None = None,
    dim: int = HEAD_DIM,
) -> list[str]:
    """The names of operations of `table` whose results differ from those in `specified`, if it has them.

    `target`: the device that computes both, if it is not the CPU. `dim`: the width of heads.
    """
    found = set[str]()
    for case in chain.from_iterable(cases_by_type(dim, target).values()):
        if case.name in specified and case.name in table and not case.agrees(table, specified):
            found.add(case.name)
    return sorted(found)


@dataclass(frozen=True)
class Case:
    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    sections: int | None = None
    tolerance: float = 0.0
    """How far results may differ."""

    def agrees(
        self, table: Mapping[str, Callable[..., Any]], specified: Mapping[str, Callable[..., Any]]
    ) -> bool:
        """Whether both tables compute the same."""
        tolerance = self.tolerance
        if self.name == "linear" and isinstance(matrix := self.arguments[1], Grouped):
            # Inputs below 4.5 are rounded to 16 bits, by 4.5 / 65,278 at most; a fifth of that counts here.
            tolerance = max(tolerance, 1.4e-5 * float(matrix.widened(torch.float32).abs().sum(1).max()))
        return _near(self.compute(table), self.compute(specified), tolerance)

    def compute(self, table: Mapping[str, Callable[..., Any]]) -> Any:
        arguments = [x.clone() if isinstance(x, Tensor) else x for x in self.arguments]
        if "linear" in self.name:
            gated = self.name == "gated_linear"
            arguments[1] = table["pack"](arguments[1], gated=gated, sections=self.sections)
        if self.name == "experts":
            gated = arguments[5] not in WITHOUT_GATES
            for place, options in ((3, {"gated": gated}), (4, {"sections": self.sections})):
                packed = [table["pack"](matrix, **options) for matrix in arguments[place]]
                arguments[place] = table.get("collect_experts", tuple)(packed)
        elif self.name == "route":
            arguments[1] = table["pack"](arguments[1], plain=True)
        elif self.name == "latent_attention":
            arguments[2] = table.get("pack_latent", latent_ops.pack_latent)(*arguments[2])
        result = table[self.name](*arguments, **self.options)
        return (result, arguments[_WRITTEN[self.name]]) if self.name in _WRITTEN else result

    def moved(self, target: torch.device) -> Case:
        options = {name: moved(option, target) for name, option in self.options.items()}
        arguments = tuple(moved(argument, target) for argument in self.arguments)
        return replace(self, arguments=arguments, options=options)


def moved(argument: Any, target: torch.device) -> Any:
    """The same argument with its tensors on another device."""
    match argument:
        case Tensor():
            return argument.to(target)
        case list():
            return [moved(each, target) for each in cast("list[Any]", argument)]
        case tuple():
            return tuple(moved(each, target) for each in cast("tuple[Any, ...]", argument))
        case HeadPrep():
            given = msgspec.structs.asdict(argument)
            return HeadPrep(**{name: moved(value, target) for name, value in given.items()})
        case StateRows():
            return replace(argument, table=argument.table.to(target))
        case ForwardContext() | Grouped() | Factors() | Segments():
            values = {each.name: getattr(argument, each.name) for each in fields(argument)}
            return replace(argument, **{name: moved(value, target) for name, value in values.items()})
        case _:
            return argument


def cases_by_type(
    dim: int, target: torch.device | None, *further: torch.dtype
) -> dict[torch.dtype, list[Case]]:
    """The cases of each number type, whose numbers are drawn one after the other."""
    made = torch.Generator().manual_seed(0)
    found: dict[torch.dtype, list[Case]] = {}
    for dtype in dict.fromkeys([*TOLERANCE, *further]):
        tolerance = TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])
        every = (*_cases(made, dtype, dim), *(_wide_cases(dtype) if target is None else ()))
        cases = [replace(case, tolerance=max(tolerance, case.tolerance)) for case in every]
        found[dtype] = cases if target is None else [case.moved(target) for case in cases]
    return found


def _cases(made: torch.Generator, dtype: torch.dtype, dim: int) -> list[Case]:
    """Calls of every operation, with sizes that are no multiples of a vector or a tile."""

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made).to(dtype)

    x, residual, weight, bias = values(5, 67), values(5, 67), values(67), values(67)
    q, k, v, kv = values(10, 6, dim), values(10, 2, dim), values(10, 2, dim), values(2, 9, 2, 4, dim)
    cos_sin, step, planes = values(10, dim).float(), _step(), (BitPlane(3, 4, 8), BitPlane(0, 1, 1))
    words = torch.randint(-(1 << 31), 1 << 31, (37, 9), generator=made, dtype=torch.int32)
    pixels = words[:36].view(torch.uint8).view(3, 12, 12, 3)
    products = [
        Case(name, (values(rows, 67), values(102, 67), values(102), *kind))
        for rows in (1, 4, 29)
        for name, kind in (("linear", ()), ("gated_linear", ("silu",)), ("gated_linear", ("gelu",)))
    ]
    return [
        *products,
        Case("linear", (values(13, 80), values(102, 80), values(102)), sections=8),
        *_quantized_cases(made, dtype),
        *_expert_cases(made, dtype),
        Case("rms_norm", (x, weight, 1e-5)),
        Case("add_rms_norm", (x, residual, weight, 1e-5)),
        *[Case("sum_squares", given) for given in ((x, 1), (values(5, 72), 8))],
        *[Case("split_words", given) for given in ((words, 4), (words.t(), 8, (3, 1, 2, 0)))],
        Case("split_blocks", (words.view(torch.uint8).view(37, 3, 12), 16, planes, 32)),
        Case("front_rms_norm", (x, weight[:50], 1e-5)),
        Case("spread_rms_norm", (x, weight, values(5, 1).float().square() * 67, 67, 1e-5)),
        Case("layer_norm", (x, weight, bias, 1e-5)),
        Case("add_layer_norm", (x, residual, weight, bias, 1e-5)),
        Case("add", (x, bias)),
        Case("scale", (x, 0.37)),
        Case("scale_by_position", (x, 3 * torch.arange(len(x)), 0.1, 4)),
        Case("embed", (torch.tensor([4, 0, 3]), x)),
        Case("patches", (pixels, torch.arange(768.0).view(3, 256).to(dtype), 2), {"depth": 2, "merge": 2}),
        Case("angles", (step.positions, values(33).float(), 0.5)),
        Case("angles", (torch.arange(30).view(3, 10), values(33).float(), 0.5, torch.arange(33) % 3)),
        *[Case("activation", (x, kind)) for kind in ("gelu_tanh", "quick_gelu")],
        Case("gated", (values(5, 70), "relu")),
        Case("gated", (values(5, 70) * 5, "clamped")),
        *_head_cases((q, k, v, kv, step), cos_sin, (values(dim), values(dim), values(dim))),
        *_attention_cases((q, kv, step), values(q.shape[1]).float()),
        *_latent_cases(values, step, cos_sin),
        *_state_cases(values, step),
        *[Case("pool", (x, _segments(), mode, merge)) for mode, merge in MERGERS.items()],
        Case("normalize", (x.float(),)),
    ]


def _wide_cases(dtype: torch.dtype) -> list[Case]:
    """Attention of heads that AMX computes, apart: other cases draw the same numbers on CPUs and cards."""
    made = torch.Generator().manual_seed(0)
    shapes, step, scaled = ((10, 6), (2, 9, 2, 4), (2, 10, 2)), _step(), {"scale": 0.2}
    q, kv, own = (torch.randn(*shape, 64, generator=made).to(dtype) for shape in shapes)
    return [Case("attention", (q, kv, step), scaled), Case("encoder_attention", (q, *own, step), scaled)]


def _attention_cases(given: tuple[Tensor, Tensor, ForwardContext], of_heads: Tensor) -> Iterator[Case]:
    """Causal attention with each of its limits; `of_heads` are numbers of query heads."""
    last = given[2].positions.int()
    last[1:4], last[5:8] = 3, 11
    for limits in ({}, {"window": 3}, {"sinks": of_heads}, {"slopes": of_heads}, {"window": 4, "last": last}):
        yield Case("attention", given, {"scale": 0.2, **limits})
    q, kv, step = given
    apart, bias = kv.repeat_interleave(3, 2), of_heads[:, None] * torch.arange(9)  # no heads share a key head
    yield Case("attention", (q, apart, step), {"scale": 0.2, "bias": bias})


def _segments() -> Segments:
    """Two texts of five rows, of which the second has an instruction."""
    return Segments.packed([2, 3], [0, 1], lambda places: torch.tensor(places, dtype=torch.int32))


def _head_cases(
    given: tuple[Tensor, Tensor, Tensor, Tensor, ForwardContext],
    cos_sin: Tensor,
    norms: tuple[Tensor, Tensor, Tensor],
) -> list[Case]:
    """Heads with a place in the cache that are rotated, with norms and without, and heads that have none."""
    q_norm, k_norm, v_norm = norms
    q, k, v, _, step = given
    table, rows = q[:5].transpose(0, 1).contiguous(), torch.arange(-9, 10).clamp(-2, 2).int() + 2
    far = encoder_ops.Distances(table, table + 1, rows)
    return [
        Case("rotary_and_cache", (*given, HeadPrep(cos_sin))),
        Case("rotary_and_cache", (*given, HeadPrep(cos_sin, q_norm, k_norm, 1e-5, v_norm))),
        Case("rotate", (q, cos_sin, q_norm, 1e-5)),
        Case("encoder_attention", (q, k, v, step), {"scale": 0.2}),
        Case("encoder_attention", (q, k, v, step), {"scale": 0.2, "causal": True}),
        Case("disentangled_attention", (q, q + 1, q - 1, step, far), {"scale": 0.2}),
    ]


def _latent_cases(values: Callable[..., Tensor], step: ForwardContext, cos_sin: Tensor) -> list[Case]:
    """Five heads, of which each makes keys of 24 numbers and values of 40 from latents of 48; an indexer."""
    up = (values(5 * (24 + 40), 48) / 8, 5, 24, 48)
    given = (values(10, 5, 24 + 8), values(10, 48 + 8), up, values(9, 4, 48 + 8), step, cos_sin[:, :8])
    chosen = torch.tensor([0, 2, 3], dtype=torch.int32).repeat(10, 1)
    chosen[:3] = torch.tensor([[0, -1, -1], [0, 1, -1], [0, 1, 2]])
    keys = values(10, 36), values(10, 3).float(), values(9, 4, 36)
    return [
        Case("latent_attention", given, {"scale": 0.2}),
        Case("latent_attention", given, {"scale": 0.2, "chosen": chosen}),
        Case("choose_tokens", (values(10, 3, 36), *keys, step, cos_sin[:, :10]), {"most": 3}),
    ]


def _state_cases(values: Callable[..., Tensor], step: ForwardContext) -> list[Case]:
    """Operations on states of two key heads, or groups, of 24 numbers, and four value heads of 40."""
    x = values(10, 2 * 2 * 24 + 4 * 40)
    taps, before = values(4, x.shape[1]).float(), values(9, 3, x.shape[1]).float()
    rates, states = -values(4).float().abs(), values(9, 4, 24, 40).float()
    scanned, sums = (rates, values(4).float(), values(4).float()), 80 * values(10, 2).float().square()
    vectors = (*values(2, 10, 40), *values(2, 10, 24))
    by_channel = (-values(24, 40).float().abs(), *values(2, 40).float(), values(9, 24, 40).float())
    keyed = (values(10, 96), rates, values(96).float())
    guessed = _states([StateRow(2, 2), StateRow(7, NOWHERE, ((4, 7),), 1), StateRow(NOWHERE, NOWHERE)])
    return [
        Case("causal_conv", (x, taps, taps[0], before, step, "silu")),
        Case("gated_delta", (x, values(10, 8), rates, values(4).float(), states, step, 2, False, 1.5)),
        Case("selective_scan", (x, values(10, 4), *scanned, (0.1, 2.0), states, step, 2)),
        Case("channel_scan", (*vectors, *by_channel, step)),
        Case("keep_guesses", (x[:, 96:], values(2, 160), replace(step, states=guessed))),
        Case("channel_delta", (values(10, 4 * (2 * 24 + 40)), values(10, 4), *keyed, states, step)),
        Case("group_squares", (x[:, 96:], values(10, 160), 2, 4)),
        Case("gated_group_norm", (x[:, 96:], values(10, 160), values(160).float(), sums, 80, 1e-5)),
        Case("gate", (x, values(*x.shape), "sigmoid")),
        Case("xielu", (x, torch.tensor([0.8, 1.3]))),
        Case("gate", (x, values(*x.shape), "gelu_tanh")),
        Case("gated_norm", (x[:, 96:], values(10, 160), values(40), 1e-5)),
    ]


def _expert_cases(made: torch.Generator, dtype: torch.dtype) -> list[Case]:
    """Choices among 12 experts, and what five of them make of some rows."""

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made).to(dtype)

    softmax = Routing(experts=12, chosen=5)
    sigmoid = Routing(
        experts=12, chosen=3, scores="sigmoid", epsilon=1e-20, factor=2.5, groups=4, kept_groups=2
    )
    routes = [
        Case("route", (values(rows, 67), values(12, 67) / 8, None, correction, routing))
        for rows in (1, 29)
        for correction, routing in ((None, softmax), (values(12).float() / 4, sigmoid))
    ]
    computed: list[Case] = []
    for rows, kind, sections in (
        (1, "silu", 4),
        (3, "clamped", None),
        (2, "relu_squared", None),
        (40, "silu", 2),
    ):
        width = 40 if kind in WITHOUT_GATES else 80
        ids = torch.stack([torch.randperm(5, generator=made)[:2].sort().values for _ in range(rows)]).int()
        matrices = list(values(5, width, 67) / 8), list(values(5, 67, 40) / 8)
        given = (values(rows, 67), ids, torch.rand(rows, 2, generator=made), *matrices, kind)
        biases = {"gate_up_bias": values(5, width), "down_bias": values(5, 67)}
        computed.append(Case("experts", given, biases, sections))
        others = torch.tensor([-1, 3, -1, 0, 1], dtype=torch.int32)  # as if other ranks held two of them
        computed.append(Case("experts", given, {**biases, "places": others}, sections))
    shared = Case("add_gated", (values(5, 67), values(5, 67), values(67) / 8, values(5, 67)))
    return [*routes, *computed, shared]


def _quantized_cases(made: torch.Generator, dtype: torch.dtype) -> list[Case]:
    """Products with matrices that a checkpoint holds quantized, in each form."""
    forms = (
        (1, 2, _grouped(made, dtype, 4, False)),
        (7, 1, _grouped(made, dtype, 4, True)),
        (3, 1, _grouped(made, dtype, 8, False)),
        (1, 1, _grouped(made, dtype, 8, True)),
        (1, 2, _e4m3(made, dtype)),
        (13, 2, _e4m3(made, dtype)),
        (3, 2, _two_levels(made, dtype, 4, IQ4)),
        (1, 2, replace(_grouped(made, dtype, 4, False), kind=NF4)),
        (13, 1, replace(_grouped(made, dtype, 4, False), kind=NF4)),
        (9, 1, _two_levels(made, dtype, 5, WHOLE)),
        (1, 1, _two_levels(made, dtype, 6, WHOLE)),
        (7, 1, replace(_grouped(made, dtype, 4, False), kind=E2M1, scales=_powers(made))),
    )
    return [
        Case(
            "linear", (torch.randn(rows, matrix.inputs, generator=made).to(dtype), matrix), sections=sections
        )
        for rows, sections, matrix in forms
    ]


def _e4m3(made: torch.Generator, dtype: torch.dtype) -> Grouped:
    """A matrix [102, 80] of numbers of 8 bits, of all sizes."""
    codes = torch.randint(127, (102, 80), generator=made) + 128 * torch.randint(2, (102, 80), generator=made)
    scales = torch.rand(102, 3, generator=made) / 128
    return Grouped(codes.to(torch.uint8), 8, 32, scales, None, 80, dtype, kind=E4M3)


def _powers(made: torch.Generator) -> Tensor:
    return torch.randint(120, 128, (102, 3), generator=made, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def _two_levels(made: torch.Generator, dtype: torch.dtype, bits: int, kind: str) -> Grouped:
    """A matrix whose scales and minimums are small whole numbers times factors of two groups.

    Its groups are whole where codes have 5 or 6 bits, which would become bytes otherwise.
    """
    whole = torch.randint(64, (2, 102, 3), generator=made, dtype=torch.uint8)
    factors = torch.rand(2, 102, 2, generator=made).half() / (512 << bits)
    form = _grouped(made, dtype, bits, False, 80 if bits == 4 else 96)
    form = replace(form, kind=kind, scales=whole[0])
    if kind != WHOLE:
        return replace(form, factors=Factors(2, factors[0]))
    return replace(form, minimums=whole[1], factors=Factors(2, *factors))


def _grouped(made: torch.Generator, dtype: torch.dtype, bits: int, others: bool, inputs: int = 80) -> Grouped:
    """A quantized matrix [102, inputs]; with `others`, zero points and an order of its inputs as well."""

    def codes(columns: int) -> Tensor:
        return torch.randint(1 << bits, (102, columns), generator=made, dtype=torch.uint8)

    return Grouped(
        codes=codes(inputs),
        bits=bits,
        group=32,
        scales=(torch.rand(102, 3, generator=made) / (1 << bits)).half(),
        offsets=codes(3) if others else None,
        inputs=inputs,
        dtype=dtype,
        order=torch.randperm(inputs, generator=made).int() if others else None,
    )


def _step() -> ForwardContext:
    """A step with a whole prompt, the next chunk of a prompt, and a sequence that decodes."""
    new, total = [5, 4, 1], [5, 13, 6]
    blocks = torch.tensor([[8, 4, 0, 0], [3, 1, 7, 2], [6, 5, 0, 0]], dtype=torch.int32)
    positions = [torch.arange(stop - count, stop) for count, stop in zip(new, total, strict=True)]
    slots = [row[at // 4].long() * 4 + at % 4 for row, at in zip(blocks, positions, strict=True)]
    rows = [StateRow(2, 2, ((2, 5), (5, 6))), StateRow(7, 0), StateRow(3, 3)]
    return ForwardContext(
        positions=torch.cat(positions),
        query_starts=torch.tensor([0, 5, 9, 10], dtype=torch.int32),
        kv_lens=torch.tensor(total, dtype=torch.int32),
        block_table=blocks,
        slot_mapping=torch.cat(slots),
        states=_states(rows),
        block_size=4,
        query_lens_host=new,
        kv_lens_host=total,
    )


def _states(rows: list[StateRow]) -> StateRows:
    return StateRows(torch.tensor(state_columns(rows), dtype=torch.int32), rows)


def _near(result: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, tuple):
        return all(_near(*pair, tolerance) for pair in zip(result, expected, strict=True))
    return torch.allclose(result.float(), expected.float(), rtol=tolerance, atol=tolerance * 5)
