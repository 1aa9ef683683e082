"""Refuses tensors that do not fit each other, before a C kernel reads or writes past the end of one.

Sizes come from checkpoints, and from models that others wrote. A kernel is given few of them and takes the
rest for granted, so each operation compares its tensors first, which costs less than a microsecond.
"""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor


def refuse(operation: str, **given: Tensor | None) -> NoReturn:
    """Raise ValueError with the shapes of the tensors that an operation was given."""
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in given.items() if x is not None)
    raise ValueError(f"{operation}: these tensors do not fit each other: {shapes}")


def refuse_window(operation: str, window: int) -> NoReturn:
    """Raise ValueError because a token would not even see itself."""
    raise ValueError(f"{operation}: a window of {window} positions shows a token nothing")
