"""The operations of a CPU: the C kernels for its kind of processor, or torch's own where there are none."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from worker.kernels import check
from worker.kernels.cpu import attention, elementwise, embedding, linear, pooling, portable, quantized
from worker.kernels.cpu.library import INT, BuildError, Library, levels_here, open_library

logger = logging.getLogger(__name__)

Table = Mapping[str, Callable[..., Any]]
"""For `models.ops.use`."""


def open_kernels(threads: int, quantization: str | None = None) -> Table:
    """What is best on this machine. `threads`: how many compute, in all of this process.

    Beside the kernels' own, torch has one thread for the little that is left to it: others would keep cores
    busy for milliseconds after each of its operations, waiting for the next.
    """
    library, table = choose()
    torch.set_num_threads(threads if library is None else 1)
    if library is not None:
        library.function("set_threads", INT)(threads)
    return table if quantization is None else {**table, **_quantizing(library, quantization)}


def bind(library: Library) -> Table:
    binds = embedding.bind, linear.bind, elementwise.bind, attention.bind, pooling.bind
    return {name: operation for bind in binds for name, operation in bind(library).items()}


def _quantizing(library: Library | None, name: str) -> Table:
    """Linear layers alone."""
    scheme = quantized.find_scheme(name)
    plain = quantized.table(scheme)
    if library is None:
        logger.warning("quantized weights save memory here, but cost time: they are widened in each step")
        return plain
    table = linear.bind(library, scheme)
    if names := check.wrong(table, plain):
        logger.error("%s: %s differ from what they should compute: torch does it", name, ", ".join(names))
        return plain
    return table


@functools.cache
def choose() -> tuple[Library | None, Table]:
    """Once for the process: no library means that there is none for this machine."""
    reason = "they need a processor with AVX2, and Linux"
    for level in levels_here():
        try:
            library = open_library(level)
        except BuildError as error:
            reason = str(error)
            continue
        if level.name == "amx" and not library.function("allow_tiles", result=INT)():
            continue  # the next level does without tiles
        if not (names := check.wrong(table := bind(library))):
            return library, table
        reason = f"on this machine these compute something else than they should: {', '.join(names)}"
        logger.error("the %s kernels are not used: %s", level.name, reason)
    logger.warning("the C kernels are not used, so a step takes 2 to 3 times as long: %s", reason)
    return None, portable.TABLE
