"""Draws of tokens with filters for each row."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.sampling.top_k_top_p import Draws


def make_draws(
    points: np.ndarray,
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    target: torch.device,
) -> Draws:
    """Draws of rows in their order."""

    def column(values: object, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype).to(target)[:, None]

    return Draws(
        rows=torch.arange(len(points), dtype=torch.int32, device=target),
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        points=column(points, torch.int32),
        largest_k=max(top_k),
        has_min_p_or_top_k=max(top_k) > 0 or max(min_p) > 0,
        has_top_p=min(top_p) < 1,
        bounded=False,
    )
