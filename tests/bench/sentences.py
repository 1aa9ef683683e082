"""Inputs per second of sentence-transformers in its own process, tokenizing included.

python tests/bench/sentences.py FOLDER DTYPE TOKENS
"""

from __future__ import annotations

import random
import sys
import time

import torch
from sentence_transformers import SentenceTransformer

_BATCH, _RUNS = 32, 5


def main(folder: str, dtype: str, tokens: int) -> None:
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    words = [word for word in model.tokenizer.get_vocab() if word.isalpha() and len(word) > 3]
    dice = random.Random(0)
    texts = [" ".join(dice.choices(words, k=tokens - 2)) for _ in range(_BATCH)]  # and two marks at the ends
    rates: list[float] = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        model.encode(texts, batch_size=_BATCH, show_progress_bar=False)
        rates.append(_BATCH / (time.perf_counter() - started))
    print(sorted(rates)[_RUNS // 2])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
