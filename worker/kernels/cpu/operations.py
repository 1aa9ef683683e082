"""The operations of a CPU: the C kernels for its kind of processor, or torch's own where there are none."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from contextlib import suppress
from pathlib import Path

import torch

from worker import logs
from worker.host.cpu_threads import give_threads
from worker.host.machine import cache_folder
from worker.host.private_folder import file_states, is_trusted, make_private
from worker.kernels import compare_with_reference
from worker.kernels.compare_with_reference import wrong
from worker.kernels.cpu import attention, latent_attention, linear, recurrent, rowwise
from worker.kernels.cpu.library import BuildError, Library, levels_here, open_library, processor_text
from worker.kernels.cpu.quantization import Scheme, find_scheme
from worker.kernels.cpu.torch_operations import TABLE, Table, linear_operations

logger = logging.getLogger(__name__)


def open_kernels(threads: int, quantization: str | None = None, input_bits: int | None = None) -> Table:
    """The fastest operations that this machine can run. `threads`: how many compute, in all of this process.
    `quantization`: how plain matrices are quantized; `input_bits`: bits to which inputs of matrices are
    rounded that are quantized already.
    """
    library, table = choose_kernels()
    give_threads(threads, None if library is None else library.function("set_threads"))
    if quantization is None and input_bits is None:
        return table
    return {**table, **_quantizing(library, quantization, input_bits)}


def bind(library: Library) -> Table:
    """All operations of a library."""
    binds = linear.bind, rowwise.bind, attention.bind, latent_attention.bind, recurrent.bind
    return {name: operation for bind in binds for name, operation in bind(library).items()}


def _quantizing(library: Library | None, name: str | None, input_bits: int | None) -> Table:
    """The operations of linear layers, which are all that quantization changes."""
    plain = linear_operations(_scheme(name), input_bits)
    if library is None:
        logger.warning("quantized weights save memory here, but cost time: they are widened in each step")
        return plain
    table, names = check_quantizing(library, name, input_bits)
    if names:
        of = name or f"inputs of {input_bits} bits"
        logger.error("%s: %s differ from what they should compute: torch does it", of, ", ".join(names))
        return plain
    return table


@functools.cache
def check_quantizing(
    library: Library, name: str | None, input_bits: int | None = None
) -> tuple[Table, list[str]]:
    """The kernels of a quantization, and the names of those whose results are wrong; once in a process."""
    scheme = _scheme(name)
    table = linear.bind(library, scheme, input_bits)
    return table, wrong(table, linear_operations(scheme, input_bits))


def _scheme(name: str | None) -> Scheme | None:
    return None if name is None else find_scheme(name)


_proved_level = ""
"""The level whose kernels were checked for this process by another one."""


def prove_in_a_fork() -> None:
    """Check the kernels for all processes that are forked from this one, which is to have no threads.

    A fork of its own does so, because kernels start some. If it finds none that are right, or ends before it
    has, each later process checks for itself.
    """
    global _proved_level
    told, telling = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            library, _ = choose_kernels()
            os.write(telling, b"" if library is None else library.level.name.encode())
            logs.flush()
        finally:
            os._exit(0)
    os.close(telling)
    _proved_level = os.read(told, 64).decode()
    os.close(told)
    os.waitpid(pid, 0)
    if _proved_level:
        choose_kernels()


def _proof(library: Library) -> Path:
    """The path of the file that says that this library was checked: on this processor, with these bindings,
    against this torch."""
    code = [*Path(__file__).parent.glob("*.py"), Path(compare_with_reference.__file__)]
    known = library.path.name, processor_text(), torch.__version__, file_states(code)
    return cache_folder() / f"proved-{hashlib.sha256(repr(known).encode()).hexdigest()[:32]}"


@functools.cache
def choose_kernels() -> tuple[Library | None, Table]:
    """Choose, once in a process, the library for this machine, if there is one, and the operations."""
    reason = "they need a processor with AVX2 or of ARM with 64 bits, and Linux"
    for level in levels_here():
        try:
            library = open_library(level)
        except BuildError as error:
            reason = str(error)
            continue
        if level.name == "amx" and not library.function("allow_tiles")():
            continue  # the next level does without tiles
        table, proof = bind(library), _proof(library)
        if level.name == _proved_level or is_trusted(proof):
            return library, table
        if not (names := wrong(table)):
            with suppress(OSError):  # then each start checks them
                make_private(proof.parent)
                proof.touch(0o600)
            return library, table
        reason = f"on this machine these compute something else than they should: {', '.join(names)}"
        logger.error("the %s kernels are not used: %s", level.name, reason)
    logger.warning("the C kernels are not used, so a step takes 2 to 3 times as long: %s", reason)
    return None, TABLE
