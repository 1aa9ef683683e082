"""The operations of a CUDA device: our Triton kernels and cuBLAS, proved when it is opened."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from worker.kernels import check
from worker.kernels.cuda import attention, linear, norms, rotary
from worker.kernels.cuda.card import Card
from worker.kernels.cuda.latent import attention as latent
from worker.kernels.cuda.pooling import segments
from worker.kernels.cuda.products import experts
from worker.kernels.cuda.products.inputs import InputForms
from worker.kernels.cuda.products.rounded import torch_multiplies

logger = logging.getLogger(__name__)

Table = dict[str, Callable[..., Any]]


def bind(card: Card, *, fp8: bool = False) -> Table:
    """All operations that have kernels, by name. `fp8`: whether `pack` makes e4m3 of plain matrices."""
    forms = InputForms()
    linears = linear.bind(card, forms, fp8=fp8)
    cached = attention.bind(card) | latent.bind(card) | rotary.bind()
    others = norms.bind(forms) | experts.bind(linear.gated) | segments.bind()
    return cached | linears | others


def open_kernels(card: Card, target: torch.device, dim: int, *, fp8: bool = False) -> Table:
    """The operations that compute the same on this card as the reference does; torch does the others.

    `dim`: the width of the model's heads, so that its variants are compiled, which it needs anyway.
    """
    if card.rounds_inputs:
        card = replace(card, scaled_mm=torch_multiplies(card, target))
    table = bind(card)
    names = check.wrong(table, target=target, dim=dim)
    if names:
        logger.error("%s differ from what they should compute on this card: torch does it", ", ".join(names))
    chosen = bind(card, fp8=fp8)
    return {name: operation for name, operation in chosen.items() if name not in names}
