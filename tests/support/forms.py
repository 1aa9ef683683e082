"""Quantized matrices with random numbers, in every form that a checkpoint may hold."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.ops.grouped_matrix import Factors, Grouped
from models.weight_coding import E2M1, E4M3, FP4, IQ4, NF4, WHOLE


@dataclass(frozen=True)
class Shape:
    """What the matrices of all forms are drawn with."""

    outputs: int
    inputs: int
    dtype: torch.dtype = torch.float32
    input_bits: int = 16

    def numbers(self, columns: int) -> Tensor:
        """A number of any sign for so many columns of each row."""
        return ((torch.rand(self.outputs, -(-self.inputs // columns)) - 0.3) / 16).half()

    def small(self, columns: int, low: int, high: int) -> Tensor:
        kind = torch.int8 if low < 0 else torch.uint8
        return torch.randint(low, high, (self.outputs, -(-self.inputs // columns)), dtype=kind)

    def powers(self) -> Tensor:
        return self.small(32, 115, 125).view(torch.float8_e8m0fnu)

    def made(self, bits: int, group: int, scales: Tensor, kind: str = WHOLE) -> Grouped:
        codes = torch.randint(1 << bits, (self.outputs, self.inputs), dtype=torch.uint8)
        return Grouped(
            *(codes, bits, group, scales, None, self.inputs, self.dtype),
            input_bits=self.input_bits,
            kind=kind,
        )

    def in_two_levels(self, bits: int) -> Grouped:
        """Scales and minimums of 6 bits, as Q4_K and Q5_K have them."""
        form = self.made(bits, 32, self.small(32, 0, 64))
        factors = Factors(8, self.numbers(256) / 16, self.numbers(256) / 16)
        return replace(form, minimums=self.small(32, 0, 64), factors=factors)


FORMS: Mapping[str, Callable[[Shape], Grouped]] = {
    "Q4_0": lambda s: s.made(4, 32, s.numbers(32)),
    "Q4_1": lambda s: replace(s.made(4, 32, s.numbers(32)), minimums=s.numbers(32)),
    "Q5_0": lambda s: s.made(5, 32, s.numbers(32)),
    "Q4_K": lambda s: s.in_two_levels(4),
    "Q5_K": lambda s: s.in_two_levels(5),
    "Q6_K": lambda s: replace(
        s.made(6, 16, s.small(16, -128, 128)), factors=Factors(16, s.numbers(256) / 32)
    ),
    "Q8_0": lambda s: s.made(8, 32, s.numbers(32)),
    "IQ4_NL": lambda s: s.made(4, 32, s.numbers(32), IQ4),
    "IQ4_XS": lambda s: replace(
        s.made(4, 32, s.small(32, -32, 32), IQ4), factors=Factors(8, s.numbers(256) / 32)
    ),
    "mxfp4": lambda s: s.made(4, 32, s.powers(), E2M1),
    "nf4": lambda s: s.made(4, 64, s.numbers(64).float(), NF4),
    "fp4": lambda s: s.made(4, 64, s.numbers(64).float(), FP4),
}
"""By the name that a form has in GGUF, or of the method that has it."""


def drawn(
    outputs: int,
    inputs: int,
    *,
    bits: int = 4,
    group: int = 32,
    zeros: bool = False,
    ordered: bool = False,
    dtype: torch.dtype = torch.float32,
    scale_type: torch.dtype = torch.float16,
    input_bits: int = 16,
) -> Grouped:
    """A matrix as GPTQ and AWQ hold it; with `zeros`, codes that stand for 0, with `ordered` an act-order."""
    groups = -(-inputs // (group or inputs))
    return Grouped(
        codes=torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8),
        bits=bits,
        group=group,
        scales=(torch.rand(outputs, groups) / (1 << bits)).to(scale_type),
        offsets=torch.randint(0, 1 << bits, (outputs, groups), dtype=torch.uint8) if zeros else None,
        inputs=inputs,
        dtype=dtype,
        order=torch.randperm(inputs).int() if ordered else None,
        input_bits=input_bits,
    )


E4M3_CODES = [code for code in range(256) if code & 127 != 127]
"""All codes but the two that are no number."""


def drawn_e4m3(outputs: int, inputs: int, group: int = 128, dtype: torch.dtype = torch.float32) -> Grouped:
    codes = torch.tensor(E4M3_CODES, dtype=torch.uint8)[torch.randint(len(E4M3_CODES), (outputs, inputs))]
    scales = torch.rand(outputs, -(-inputs // (group or inputs))) / 256
    return Grouped(codes, 8, group, scales, None, inputs, dtype, kind=E4M3)
