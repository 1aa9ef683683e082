"""Inputs in e4m3: the forms in which products read them, and rows that a kernel rounded as it computed them.

A product that rounds its inputs by itself reads them for that in a launch of its own. The kernels of norms
and gates have them in registers, and write them in 16 bits and in 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor

from worker.kernels.cuda.products.packing import Mixed, Packed
from worker.kernels.cuda.tiles import MANY_ROWS

_FILLED = 16
"""The multiple to which rows are filled up, so that scales of groups begin at a multiple of 64 bytes."""
_MOST_COLUMNS = 1 << 15
"""The widest row that is rounded as it is computed: a program holds it in registers."""


@dataclass(frozen=True, slots=True)
class InputForm:
    """The form in which a product reads its inputs."""

    columns: int
    """The numbers of a row, filled up with zeros to those of a row of the matrix."""
    groups: int
    """The scales of a row: one, or one for each 128 numbers."""

    @classmethod
    def of(cls, weight: Packed) -> Self:
        scales = weight.parts[1]
        assert scales is not None  # every matrix has them
        return cls(weight.width, len(scales))


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rows in e4m3, filled up to a multiple of 16; nothing is written to those that are left over."""

    form: InputForm
    numbers: Tensor
    """[rows, columns]"""
    by_group: Tensor
    """What each number is multiplied with [groups, rows]."""

    @classmethod
    def empty(cls, form: InputForm, rows: int, device: torch.device) -> Self:
        filled = -(-rows // _FILLED) * _FILLED
        return cls(
            form,
            torch.empty(filled, form.columns, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(form.groups, filled, dtype=torch.float32, device=device),
        )

    @property
    def scales(self) -> Tensor:
        """What each number is multiplied with [rows, groups], group by group in memory."""
        return self.by_group.t() if self.form.groups > 1 else self.by_group.view(-1, 1)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of a kernel that rounds its results, from `numbers_ptr` to GROUPED."""
        columns, filled = self.form.columns, self.by_group.shape[1]
        return self.numbers, self.by_group, columns, filled, self.form.groups > 1


NOT_ROUNDED = (None, None, 0, 0, False)
"""The same arguments for a kernel whose results are not rounded."""


class InputForms:
    """The forms in which a model's products read inputs in e4m3, by the width of these inputs.

    They are known when all matrices are packed, before the first result is computed. No kernel knows who
    reads its results; so it rounds those that are as wide as the inputs of such a product.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, torch.dtype], InputForm] = {}

    def add(self, weight: Tensor) -> None:
        """Note a matrix whose product rounds inputs by scales of their own, of two forms the first."""
        for part in weight.apart if isinstance(weight, Mixed) else (weight,):
            if isinstance(part, Packed) and part.rounds_inputs and part.input_scale is None:
                self._found.setdefault((part.inputs, part.numbers), InputForm.of(part))

    def room_beside(self, out: Tensor) -> Rounded | None:
        """Room for the rows of a result in e4m3; None if no product reads them so."""
        if out.dim() != 2 or len(out) < MANY_ROWS or out.shape[1] > _MOST_COLUMNS:
            return None
        form = self._found.get((out.shape[1], out.dtype))
        return None if form is None else Rounded.empty(form, len(out), out.device)


class WithRounded(Tensor):
    """Rows of 16 bits, beside the same rows in e4m3.

    Whoever writes to the first leaves the others as they are. So these are forgotten as soon as torch writes
    to the rows, or makes a tensor that shares their memory. Our own kernels write to new tensors only.
    """

    rounded: Rounded | None

    @classmethod
    def join(cls, rows: Tensor, rounded: Rounded | None) -> Tensor:
        if rounded is None:
            return rows
        both = rows.as_subclass(cls)
        both.rounded = rounded
        return both

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            result = func(*args, **kwargs)
        made = list(_tensors(result))
        for given in _tensors([*args, *kwargs.values()]):
            if isinstance(given, cls) and (result is None or any(_share_memory(given, one) for one in made)):
                given.rounded = None
        return result


def rounded_rows(x: Tensor, weight: Packed) -> Rounded | None:
    """The rows of x in e4m3 as the product with a matrix reads them, if the kernel that made x made these."""
    found = x.rounded if isinstance(x, WithRounded) and weight.input_scale is None else None
    return found if found is not None and found.form == InputForm.of(weight) else None


def _share_memory(one: Tensor, other: Tensor) -> bool:
    shared: bool = torch._C._is_alias_of(one, other)  # pyright: ignore
    return shared


def _tensors(given: Any) -> Iterator[Tensor]:
    """The tensors among what a function of torch takes or returns."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (tuple, list)):
        for each in cast("Sequence[Any]", given):
            yield from _tensors(each)
