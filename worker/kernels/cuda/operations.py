"""The operations of a CUDA device: our Triton kernels and cuBLAS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from worker.kernels.cuda import attention, latent_attention, linear, norms, pooling_kernel, rotary
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.fused import joined_products
from worker.kernels.cuda.products import experts, routing
from worker.kernels.cuda.recurrent import convolution, delta_rule, gates, selective_scan

Operations = dict[str, Callable[..., Any]]


def cuda_operations(card: Card, *, fp8: bool = False) -> Operations:
    """All operations that have kernels, by name. `fp8`: whether `pack` makes e4m3 of plain matrices."""
    return (
        attention.operations(card)
        | latent_attention.operations(card)
        | rotary.OPERATIONS
        | norms.OPERATIONS
        | linear.operations(card, fp8=fp8)
        | routing.OPERATIONS
        | experts.OPERATIONS
        | pooling_kernel.OPERATIONS
        | convolution.OPERATIONS
        | delta_rule.operations(card)
        | selective_scan.operations(card)
        | gates.OPERATIONS
        | joined_products.operations(card)
    )
