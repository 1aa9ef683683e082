"""The operations of a CUDA device: our Triton kernels and cuBLAS, proved when it is opened."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from worker.kernels import check
from worker.kernels.cuda import attention, latent_attention, linear, norms, pooling_kernel, rotary
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.products import experts
from worker.kernels.cuda.recurrent import convolution, delta_rule, gates, selective_scan

logger = logging.getLogger(__name__)

Operations = dict[str, Callable[..., Any]]


def cuda_operations(card: Card, *, fp8: bool = False) -> Operations:
    """All operations that have kernels, by name. `fp8`: whether `pack` makes e4m3 of plain matrices."""
    return (
        attention.operations(card)
        | latent_attention.operations(card)
        | rotary.OPERATIONS
        | norms.OPERATIONS
        | linear.operations(card, fp8=fp8)
        | experts.OPERATIONS
        | pooling_kernel.OPERATIONS
        | convolution.OPERATIONS
        | delta_rule.OPERATIONS
        | selective_scan.OPERATIONS
        | gates.OPERATIONS
    )


def open_kernels(card: Card, target: torch.device, dim: int, *, fp8: bool = False) -> Operations:
    """The operations that compute the same on this card as the reference does; torch does the others.

    `dim`: the width of the model's heads, so that its variants are compiled, which it needs anyway.
    """
    names = check.wrong(cuda_operations(card), target=target, dim=dim)
    if names:
        logger.error("%s differ from what they should compute on this card: torch does it", ", ".join(names))
    chosen = cuda_operations(card, fp8=fp8)
    return {name: operation for name, operation in chosen.items() if name not in names}
