"""The C kernels for each level of processor that this machine can run."""

import functools
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest

from worker.kernels.cpu import linear, operations
from worker.kernels.cpu.library import LEVELS, Library, levels_here, open_library
from worker.kernels.cpu.operations import Table, bind
from worker.kernels.cpu.quantization import SCHEMES

NAMES = [level.name for level in levels_here()]
BY_TURNS = [*NAMES[:1], *(pytest.param(name, marks=pytest.mark.turns(7)) for name in NAMES[1:])]
"""The levels as parameters: the best one every day, and the others by turns."""


@functools.cache
def library_of(name: str) -> Library:
    library = open_library(next(level for level in LEVELS if level.name == name))
    if name == "amx":
        assert library.function("allow_tiles")()
    return library


@functools.cache
def table_of(name: str) -> Table:
    return bind(library_of(name))


def only_level(name: str) -> AbstractContextManager[object]:
    """While it is entered, workers and models that choose kernels get those of this level."""
    return patch.object(operations, "choose_kernels", lambda: (library_of(name), table_of(name)))


def linear_table(name: str, scheme: str | None = None) -> Table:
    """The operations that read matrices, which are quantized by a scheme if one is named."""
    return linear.bind(library_of(name), None if scheme is None else SCHEMES[scheme])


def use_threads(name: str, count: int) -> None:
    library_of(name).function("set_threads")(count)
