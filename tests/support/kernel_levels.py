"""The C kernels for each level of processor that this machine can run."""

from __future__ import annotations

import functools

from worker.kernels.cpu.library import INT, LEVELS, Library, levels_here, open_library
from worker.kernels.cpu.operations import Table, bind

NAMES = [level.name for level in levels_here()]


@functools.cache
def library_of(name: str) -> Library:
    library = open_library(next(level for level in LEVELS if level.name == name))
    if name == "amx":
        assert library.function("allow_tiles", result=INT)()
    return library


@functools.cache
def table_of(name: str) -> Table:
    return bind(library_of(name))


def use_threads(name: str, count: int) -> None:
    library_of(name).function("set_threads", INT)(count)
