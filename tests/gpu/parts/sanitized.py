"""Kernels under compute-sanitizer, which sees every access to memory that is not theirs."""

import os
from collections.abc import Iterator

from parts.right import check_draws, check_operations
from results import Result
from workbench import Part, Workbench


def check_without_reserve(bench: Workbench) -> Iterator[Result]:
    """Check operations whose tensors have memory of their own each, or errors would hit what torch holds."""
    if bench.on_card:
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # read when the first tensor is made
    yield from check_operations(bench)


PARTS = (
    Part("operations", check_without_reserve, 200),
    Part("draws", check_draws, 100),
)
