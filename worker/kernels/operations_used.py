"""Records which operations a model calls, and how, so that only those kernels are tested at its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from inspect import Signature, signature
from typing import Any

import msgspec
from torch import Tensor

from models.ops import SPECIFIED
from models.ops.attention_inputs import HeadPrep
from models.ops.grouped_matrix import Grouped
from worker.kernels.compare_with_reference import Case


class Uses:
    """The operations that a model calls, with which options, and the forms of its matrices."""

    is_known = False
    """Whether all of it was seen."""

    def __init__(self, *forms: tuple[int, str]) -> None:
        """`forms` of matrices, as bits and kind, that the model has for certain."""
        self._asked: dict[str, set[str]] = {}
        self._forms = set(forms)

    def noting(self, table: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """The same operations, whose calls are noted."""
        return {name: self._noted(name, operation) for name, operation in table.items()}

    def choose(self, cases: Sequence[Case]) -> list[Case]:
        """The cases of called operations, with matrices of the model's forms, that ask for nothing else.

        To what none of these asks for comes the first that does, beside other things.
        """
        chosen: list[Case] = []
        for name, asked in self._asked.items():
            own = [
                (case, asked_of(name, case.arguments, case.options))
                for case in cases
                if case.name == name and forms_in(case.arguments) <= self._forms
            ]
            fitting = [pair for pair in own if pair[1] <= asked] or own
            missing = asked.difference(*[found for _, found in fitting])
            chosen += [case for case, _ in fitting]
            others = [next((case for case, found in own if each in found), None) for each in missing]
            chosen += [other for other in others if other is not None]
        return [case for case in cases if any(case is each for each in chosen)]

    def _noted(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(operation)
        def noted(*arguments: Any, **options: Any) -> Any:
            if "pack" in name:
                self._forms.update(forms_in(arguments))
            else:
                self._asked.setdefault(name, set()).update(asked_of(name, arguments, options))
            return operation(*arguments, **options)

        return noted


def asked_of(name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> set[str]:
    """What a call asks for: options that it gives, names of kinds, and what heads have.

    A case of a proof that makes more of its arguments by itself may give fewer of them.
    """
    found = set[str]()
    signed = _signature(name)
    for parameter, value in signed.bind_partial(*arguments, **options).arguments.items():
        default = signed.parameters[parameter].default
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, HeadPrep):
            found |= {part for part, given in msgspec.structs.asdict(value).items() if _is_tensor(given)}
        elif default is not Signature.empty and (_is_tensor(value) or value != default):
            found.add(parameter)
    return found


@cache
def _signature(name: str) -> Signature:
    return signature(SPECIFIED[name])


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def forms_in(arguments: Sequence[Any]) -> set[tuple[int, str]]:
    """The bits and kinds of quantized matrices among the arguments of a call."""
    return {(each.bits, each.kind) for each in arguments if isinstance(each, Grouped)}
