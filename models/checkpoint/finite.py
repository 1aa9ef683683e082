"""The check that weights are finite: at once, or at the end where each look would make the host wait."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from models.weight_pieces import DAMAGED, WeightsError


class FiniteCheck:
    """Refuses tensors that hold a number which is not finite, as the model will have it."""

    def __init__(self, *, at_once: bool) -> None:
        """`at_once`: whether a tensor's values can be asked for without waiting for a device."""
        self._at_once = at_once
        self._sums: list[Tensor] = []
        self._suspects: list[tuple[str, Callable[[], Tensor], torch.dtype]] = []

    def add(self, name: str, tensor: Tensor, read: Callable[[], Tensor]) -> None:
        """Check a tensor; `read` gives it as it is stored, to see what is wrong with it."""
        if not tensor.is_floating_point() or tensor.itemsize == 1 or tensor.is_meta:
            return  # torch adds up no numbers of 8 bits
        if not self._at_once:
            self._sums.append(tensor.sum(dtype=torch.float32))
            self._suspects.append((name, read, tensor.dtype))
        elif not tensor.sum().isfinite():
            _refuse_infinite(name, read(), tensor)

    def finish(self) -> None:
        """Look at all that was not looked at yet. What seems wrong is read again, on the host."""
        if not self._sums:
            return
        are_finite = torch.stack(self._sums).isfinite().tolist()
        for is_finite, (name, read, dtype) in zip(are_finite, self._suspects, strict=True):
            if not is_finite:
                _refuse_infinite(name, stored := read(), stored.to(dtype))


def _refuse_infinite(name: str, stored: Tensor, tensor: Tensor) -> None:
    """Raise if a tensor holds a number that is not finite.

    A sum is finite only if all its terms are, and takes no longer than to read them. It may be infinite
    although they are not, so they are counted before anything is said.
    """
    wrong, from_file = ((~x.isfinite()).sum().item() for x in (tensor, stored))
    if from_file:
        raise WeightsError(
            f"{name} has {from_file} of {stored.numel()} numbers that are NaN or infinite; {DAMAGED}"
        )
    if wrong:
        largest, kind = stored.abs().max().item(), str(tensor.dtype).removeprefix("torch.")
        raise WeightsError(
            f"{name} has numbers up to {largest:.3g}, which {kind} cannot hold: choose another --dtype"
        )
