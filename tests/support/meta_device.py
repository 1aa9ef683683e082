"""A device without memory, torch's "meta", which stands for a GPU: to read one of its values is an error."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worker.devices.cpu import Cpu
from worker.ranks.process_groups import Groups
from worker.sampling import token_bounds as bounds
from worker.sampling.grouped_logits import BY_TORCH
from worker.sampling.top_k_top_p import draw_fully
from worker.steps.compute import Compute, Computing
from worker.steps.output import Fetch

_HOST = torch.device("cpu")


class Meta(Cpu):
    """A device that stands for a GPU: its tensors may meet the host's in the copies of a step only."""

    target = torch.device("meta")
    name = "meta"

    def __init__(self) -> None:
        super().__init__(1)
        self.scan, self.draw, self.forbid = BY_TORCH, draw_fully, bounds.forbid

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.target)

    def staging_buffer(self, words: int) -> tuple[Tensor, Tensor]:
        there = torch.empty(words, dtype=torch.int32, device=self.target)
        return torch.empty(words, dtype=torch.int32), there

    def quickened(self, compute: Compute, groups: Groups) -> Computing:
        return compute

    def fetch(self, values: Tensor) -> Fetch:
        assert values.device == self.target
        return torch.ones(values.shape, dtype=values.dtype).numpy


class _NoNumbers(TorchFunctionMode):
    """A mode that refuses tensors of the device made of Python's numbers, which no dispatch mode sees."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu") != _HOST:
            raise AssertionError("torch.tensor copies numbers to the device")
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(each, (list, np.ndarray)) for each in index):
                raise AssertionError("an index of Python's numbers is copied to the device")
        return func(*args, **kwargs)


class NoMixing(TorchDispatchMode):
    """A mode that refuses an index on the host, or a copy from it within a step: the host would wait."""

    def __enter__(self) -> Self:
        self._numbers = _NoNumbers()
        self._numbers.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._numbers.__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        homes = {each.device.type for each in tensors} | {torch.device(kwargs.get("device") or "meta").type}
        if func is not torch.ops.aten.copy_.default and homes - {"meta"} and any(t.is_meta for t in tensors):
            raise AssertionError(f"{func} works on {homes}")
        if func is torch.ops.aten._to_copy.default and len(homes) > 1:
            raise AssertionError(f"{func} copies between {homes}")
        return func(*args, **kwargs)
