"""A device without memory, torch's "meta", which stands for a GPU: to read one of its values is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worker.devices.base import Fetch
from worker.devices.cpu import Cpu
from worker.sampling.draw import draw_fully
from worker.sampling.groups import BY_TORCH
from worker.steps.compute import Compute, Computing


class Meta(Cpu):
    """A device that stands for a GPU: its tensors may meet the host's in the copies of a step only."""

    target = torch.device("meta")
    name = "meta"

    def __init__(self) -> None:
        super().__init__(1)
        self.scan, self.draw = BY_TORCH, draw_fully

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.target)

    def staging_buffer(self, words: int) -> tuple[Tensor, Tensor]:
        there = torch.empty(words, dtype=torch.int32, device=self.target)
        return torch.empty(words, dtype=torch.int32), there

    def quickened(self, compute: Compute, *, replays: bool) -> Computing:
        return compute

    def fetch(self, values: Tensor) -> Fetch:
        assert values.device == self.target
        return Fetch(torch.ones(values.shape, dtype=values.dtype), None)


class NoMixing(TorchDispatchMode):
    """A mode that refuses an index on the host, or a copy from it within a step: the host would wait."""

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
