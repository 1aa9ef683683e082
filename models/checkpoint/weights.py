"""Weights are pulled: each layer reads its own tensors, and of them only the piece that this rank holds.

A `Weights` is a scope in a checkpoint ("model.layers.3.mlp"). `load` walks the modules of a model; a module
that holds tensors has a `pull` method, which knows their names and how they are cut, and takes them. There is
no table that maps names to names. Tensors that no module took, or that modules did not find, are reported at
the end, all at once.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, islice, takewhile
from math import prod
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from models.checkpoint.damage import FiniteCheck
from models.checkpoint.files import Source, Stored, Upload, convert, open_source
from models.plain_files import shown
from models.weight_coding import Quantization
from models.weight_slices import Cut, WeightsError

FLOATS = ("float32", "float16", "bfloat16")
"""Number types of weights. Others, such as those of quantized weights, mean nothing without their scales."""

_ROOM = 140
"""Characters that problems beyond the first may take in an error, which is to fit into a line."""
_MOST_PROBLEMS = 3
_ALWAYS_POSSIBLE = 1 << 24
"""Elements of a tensor that does not fit, but is small enough to go on."""

logger = logging.getLogger(__name__)


def no_report(fraction: float) -> None:
    """Ignore the progress of loading."""


class Reading:
    """One pass over a checkpoint: it keeps count of the tensors that were taken and of all that was wrong."""

    def __init__(
        self,
        source: Source,
        *,
        device: torch.device,
        dtype: torch.dtype,
        headers_only: bool = False,
        quantization: Quantization | None = None,
        report: Callable[[float], None] = no_report,
        upload: Upload | None = None,
        is_checked: bool = False,
        has_packed: bool = False,
    ) -> None:
        """`headers_only`: compare names, shapes and types, and give zeros without memory for all tensors.

        `upload`: what brings tensors of files to a device that has memory of its own.
        `is_checked`: whether all numbers are known to be finite, so that what nobody reads stays unread.
        `has_packed`: whether there are matrices that an earlier load has packed. Then codes of quantized ones
        are tensors without memory, and so are numbers that would be converted before they are packed.
        """
        self.quantization = quantization
        self.headers_only = headers_only
        self._has_packed = has_packed
        self.device = device
        self.dtype = dtype
        self.bytes_read = 0
        self._source = source
        self._report = report
        self._bring = upload if upload is not None and self.is_real else partial(convert, device)
        self._finite = None if is_checked else FiniteCheck(at_once=upload is None)
        self._total = sum(stored.elements for stored in source.tensors.values())
        self._sorted = sorted(source.tensors)
        self._passed = 0
        self._types = source.types
        self._taken: set[str] = set()
        self._ignored: set[str] = set()
        self._problems: list[str] = []

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors; none if they are made up, and nothing is known of a checkpoint."""
        return self._types.keys()

    @property
    def is_real(self) -> bool:
        """Whether there are files, and not dummy weights."""
        return bool(self._source.tensors)

    def stored_shape(self, name: str) -> tuple[int, ...] | None:
        stored = self._source.tensors.get(name)
        return None if stored is None else stored.shape

    def stored_type(self, name: str) -> str | None:
        """The type of a tensor's numbers; None if there is no such tensor."""
        return self._types.get(name)

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: Cut | None,
        dtype: torch.dtype | None,
        kinds: Sequence[str] = FLOATS,
        *,
        to_pack: bool = False,
    ) -> Tensor:
        """Read a tensor of one of the number types `kinds`. `dtype`: None leaves it as it was stored.

        `to_pack`: whether it is read to be packed, and may have no memory if it is not used as stored.
        """
        stored = self._source.find(name, shape, kinds)
        is_as_wanted = stored is not None and f"torch.{stored.dtype}" == str(dtype)
        if dtype is None:
            as_stored = stored.dtype if stored and stored.dtype in kinds else kinds[0]
            dtype = cast("torch.dtype", getattr(torch, as_stored, torch.uint8))  # blocks come as bytes
        if stored is None:
            return self._misfit(f"{shown(name)} is missing in {self._source.place}", shape, cut, dtype)
        first = name not in self._taken
        self._taken.add(name)
        if problem := _misfit_of(stored, shape, kinds):
            return self._misfit(f"{shown(name)} in {stored.file} {problem}", shape, cut, dtype)
        if self.headers_only:
            return self._zeros(shape, cut, dtype)
        before, self._passed = self._passed, self._passed + (stored.elements if first else 0)
        added, total = self._passed - before, max(self._total, self._passed, 1)
        if to_pack and self._has_packed and not is_as_wanted:
            self._report(self._passed / total)
            return self._zeros(shape, cut, dtype, torch.device("meta"))
        read = stored.read(cut)
        self.bytes_read += read.nbytes
        tensor = self._bring(read, dtype, lambda done: self._report((before + done * added) / total))
        if self.is_real and self._finite is not None:
            self._finite.add(f"{stored.file}: {shown(name)}", tensor, partial(stored.read, cut))
        return tensor

    @contextmanager
    def packing_nothing(self) -> Iterator[None]:
        """Have all be read within the context, of a matrix that is not packed."""
        before, self._has_packed = self._has_packed, False
        try:
            yield
        finally:
            self._has_packed = before

    def origin(self, name: str) -> str:
        return f"{self._source.tensors[name].file}: {shown(name)}"

    def expect(self, name: str) -> None:
        """Let it be an error if nobody takes a tensor, although it has been read."""
        self._taken.discard(name)

    def ignore(self, name: str) -> None:
        if name in self._ignored:
            return
        self._ignored.add(name)
        self._total -= sum(self._source.tensors[known].elements for known in self._within(name))

    def finish(self) -> None:
        """Raise an error that lists every tensor that does not fit, or names one that is not finite."""
        if self._finite is not None:
            self._finite.finish()
        problems = self._problems + [
            f"{shown(name)} in {stored.file} has no place in the model"
            for name, stored in sorted(self._source.tensors.items())
            if name not in self._taken and not self._is_ignored(name)
        ]
        if problems:
            raise self._unfit(problems)
        self._report(1.0)

    def _misfit(self, problem: str, shape: tuple[int, ...], cut: Cut | None, dtype: torch.dtype) -> Tensor:
        """Note a problem, so that loading goes on to find others.

        It ends here if one tensor would be larger than all there are: what is made of it would take too much.
        """
        self._problems.append(problem)
        if prod(shape) > max(_ALWAYS_POSSIBLE, self._total):
            raise self._unfit(self._problems)
        return self._zeros(shape, cut, dtype)

    def _zeros(
        self, shape: tuple[int, ...], cut: Cut | None, dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor:
        size = list(shape) if cut is None else cut.shape_of(shape)
        return torch.zeros((), device=device or self.device, dtype=dtype).expand(size)

    def _unfit(self, problems: list[str]) -> WeightsError:
        for problem in problems:
            logger.debug("weights and config.json do not fit: %s", problem)
        if self.quantization is None:
            return WeightsError(f"weights and config.json do not fit: {_listed(problems)}")
        return WeightsError(
            f"weights and config.json ({self.quantization.describe()}) do not fit: {_listed(problems)}; take "
            "both from one checkpoint"
        )

    def _within(self, scope: str) -> Iterator[str]:
        """The names of all tensors of a scope, or of the one that has this name."""
        if scope in self._source.tensors:
            yield scope
        start = bisect_left(self._sorted, f"{scope}.")
        yield from takewhile(lambda name: name.startswith(f"{scope}."), islice(self._sorted, start, None))

    def _is_ignored(self, name: str) -> bool:
        scopes = accumulate(name.split("."), "{}.{}".format)
        return any(scope in self._ignored for scope in scopes)


def _misfit_of(stored: Stored, shape: tuple[int, ...], kinds: Sequence[str]) -> str | None:
    """The predicate of a sentence on what is wrong with a tensor, as far as its header tells."""
    if stored.shape != shape:
        return f"has the shape {list(stored.shape)}, not {list(shape)}"
    if stored.dtype not in kinds:
        return f"holds numbers of the type {stored.dtype}, not {_either(kinds)}"
    return None


def _either(kinds: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))


def _listed(problems: list[str]) -> str:
    """The first problems, as many as a line has room for, and the number of others."""
    shown = problems[:1]
    for problem in problems[1:_MOST_PROBLEMS]:
        if sum(map(len, shown)) + len(problem) > _ROOM:
            break
        shown.append(problem)
    others = len(problems) - len(shown)
    return "; ".join(shown) + (f"; and {others} more" if others else "")


class Weights:
    """A scope in a checkpoint: `weights / "mlp"` descends, `weights.take("weight", shape)` reads."""

    def __init__(self, reading: Reading, path: str = "", names: Mapping[str, str] | None = None) -> None:
        """`names`: what the checkpoint calls modules, by the names that the model has for them."""
        self.reading = reading
        self.path = path
        self._names = names or {}

    @property
    def device(self) -> torch.device:
        return self.reading.device

    @property
    def dtype(self) -> torch.dtype:
        return self.reading.dtype

    def at(self, path: str) -> Weights:
        """The scope of the same checkpoint with this whole name."""
        return Weights(self.reading, path, self._names)

    def renamed(self, names: Mapping[str, str]) -> Weights:
        """The same scope, in which modules have the names of a family's checkpoints."""
        return Weights(self.reading, self.path, names)

    def __truediv__(self, name: str) -> Weights:
        return self.at(self.join(self._names.get(name, name))) if name else self

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has the tensor `name` in this scope."""
        return self.join(name) in self.reading.names

    def sibling(self, name: str) -> Weights:
        """The scope `name` beside this one: a layer qkv_proj finds its tensors in the sibling q_proj."""
        return self.at(self.path.rpartition(".")[0]) / name

    def first(self, *names: str) -> Weights:
        """The first of these scopes that the checkpoint has; "" is this one, and the last is the default.

        A trunk may be saved with its head (model.layers...) or alone (layers...).
        """
        for name in names[:-1]:
            scope = self / name
            if any(known.startswith(f"{scope.path}.") for known in self.reading.names):
                return scope
        return self / names[-1]

    def take(
        self,
        name: str,
        shape: Sequence[int],
        cut: Cut | None = None,
        dtype: torch.dtype | None = None,
        *,
        to_pack: bool = False,
    ) -> Tensor:
        """Read the tensor `name`, which must have `shape`, or its piece `cut`, onto the device.

        `to_pack`: whether it becomes a packed matrix. If there is one, it may have no memory.
        """
        return self.reading.take(self.join(name), tuple(shape), cut, dtype or self.dtype, to_pack=to_pack)

    @property
    def headers_only(self) -> bool:
        return self.reading.headers_only

    @property
    def is_real(self) -> bool:
        return self.reading.is_real

    def stored_shape(self, name: str) -> tuple[int, ...] | None:
        return self.reading.stored_shape(self.join(name))

    def stored(self, name: str, shape: Sequence[int], kinds: Sequence[str], cut: Cut | None = None) -> Tensor:
        """Read the tensor `name` as it was stored, in one of the number types `kinds`."""
        return self.reading.take(self.join(name), tuple(shape), cut, None, kinds)

    def codes(self, name: str, shape: Sequence[int], kinds: Sequence[str], cut: Cut | None = None) -> Tensor:
        """Read codes as they were stored, or, if packed matrices hold them, a tensor without memory."""
        return self.reading.take(self.join(name), tuple(shape), cut, None, kinds, to_pack=True)

    def origin(self, name: str) -> str:
        return self.reading.origin(self.join(name))

    def expect(self, name: str) -> None:
        self.reading.expect(self.join(name))

    def stored_type(self, name: str) -> str | None:
        return self.reading.stored_type(self.join(name))

    def ignore(self, *names: str) -> None:
        """Name tensors or whole scopes that a checkpoint may carry and that are not needed; "" is all."""
        for name in names:
            self.reading.ignore(self.join(name))

    def join(self, name: str) -> str:
        return ".".join(part for part in (self.path, name) if part)


@runtime_checkable
class Pulls(Protocol):
    """A module that reads its own tensors."""

    def pull(self, weights: Weights) -> None:
        """Take this module's tensors; `weights` is the scope of the module's own name.

        Before weights are read, another model of the same class pulls zeros, to compare it with headers.
        """
        ...


def load(module: nn.Module, weights: Weights) -> None:
    """Fill a module and all it contains, in the order of construction.

    A module without `pull` gives each of its children the scope of the child's name. A module may list in
    `ignored` the tensors that old checkpoints carry in its scope and that are not needed.
    """
    weights.ignore(*getattr(module, "ignored", ()))
    if isinstance(module, Pulls):
        module.pull(weights)
    else:
        load_children(module, weights)


def load_children(module: nn.Module, weights: Weights) -> None:
    """Fill what a module contains, each child from the scope of its name."""
    for name, child in module.named_children():
        load(child, weights / name)


def open_weights(
    folder: Path,
    load_format: str = "auto",
    *,
    device: torch.device,
    dtype: torch.dtype,
    headers_only: bool = False,
    report: Callable[[float], None] = no_report,
) -> Weights:
    """Open the whole checkpoint as one scope; call `reading.finish()` when the model is filled."""
    source = open_source(folder, load_format, 0, device)
    return Weights(Reading(source, device=device, dtype=dtype, headers_only=headers_only, report=report))
