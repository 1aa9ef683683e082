"""Inputs per second of sentence-transformers in its own process, tokenizing included.

python tests/bench/sentences.py FOLDER DTYPE TOKENS
"""

from __future__ import annotations

import sys
import time
from itertools import islice
from pathlib import Path

import texts
import torch
from sentence_transformers import SentenceTransformer

_BATCH, _RUNS = 32, 5


def main(folder: str, dtype: str, tokens: int) -> None:
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    batch = list(islice(texts.texts(Path(folder), tokens), _BATCH))
    rates: list[float] = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        model.encode(batch, batch_size=_BATCH, show_progress_bar=False)
        rates.append(_BATCH / (time.perf_counter() - started))
    print(sorted(rates)[_RUNS // 2])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
