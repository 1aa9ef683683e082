"""How many threads compute on a CPU, and who has them: the C kernels, or torch where there are none."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.host.machine import usable_cores

_TORCH_THREADS = torch.get_num_threads()
"""The threads that torch would use: it has read OMP_NUM_THREADS, and who sets that means us too."""


def count_threads(asked: int | None, ranks: int) -> int:
    """Returns the threads of one of `ranks` workers of this machine: by default its share of cores."""
    return asked or min(max(1, usable_cores() // ranks), _TORCH_THREADS)


def give_threads(threads: int, to_kernels: Callable[[int], object] | None) -> None:
    """Gives the kernels that many threads, or torch if there are no kernels.

    Beside kernels torch gets one, for the little that is left to it: others would keep cores busy for
    milliseconds after each of its operations, waiting for the next.
    """
    torch.set_num_threads(1 if to_kernels else threads)
    if to_kernels:
        to_kernels(threads)
