"""The choice of rows of a step of which keys and values of all heads are made: long prompts.

With DeepSeek's widths a query needs 320 products for each head and token that it sees if they are made, and
1,088 with the latent itself. To make those of one token takes as many products as 170 queries save on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from worker.kernels.cuda.plan import Blocks, Heads, Prompt, cut, plan_prompts_and_decodes
from worker.kernels.cuda.tiles import Tiles, latent_tiles, made_tiles

FEW_QUERIES = 512
"""The new tokens of a row up to which its queries are compared with latents themselves.

The largest graph of a step with prompts has no more: what is captured must not depend on lengths."""
MOST_MADE = 1 << 20
"""The most tokens times heads of a row whose keys and values are made: 512 MiB for DeepSeek's widths."""


def most_made(longest: int, heads: int) -> int:
    """The most tokens of a row whose keys and values are made, if no row has more than `longest`."""
    return min(longest, MOST_MADE // heads)


def plan_latents(
    new: Sequence[int],
    total: Sequence[int],
    heads: Heads,
    dtype: torch.dtype,
    capability: int,
    processors: int,
    longest: int,
) -> list[tuple[Blocks, Tiles]]:
    """Launches for rows with `new` tokens at the end of `total`, one for each prompt whose keys are made.

    `longest`: the most tokens that a row can have.
    """
    counts, lengths = np.asarray(new), np.asarray(total)
    made = (counts > FEW_QUERIES) & (lengths * heads.queries <= MOST_MADE)
    launches: list[tuple[Blocks, Tiles]] = []
    if not made.all():
        short, long = (latent_tiles(dtype, short=short) for short in (True, False))
        planned = plan_prompts_and_decodes(new, total, heads, short, long, processors, made)
        launches = [(blocks, short if blocks.short else long) for blocks in planned]
    tiles = made_tiles(capability, dtype, heads.made)
    for row in np.flatnonzero(made).tolist():
        rows, tokens = cut(np.array([row]), counts, tiles.queries)
        prompt = Prompt(row, int(lengths[row]), most_made(longest, heads.queries))
        last_first = tokens[::-1].copy()  # the last queries see most keys
        launches.append((Blocks(rows, last_first, splits=1, short=False, prompt=prompt), tiles))
    return launches
