"""Texts of known lengths for a model that embeds: words of its own vocabulary, each of them one token.

    python tests/bench/texts.py FOLDER DTYPE TOKENS

prints how many of them sentence-transformers embeds a second in its own process, tokenizing included.
"""

import random
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

_MARKS = 2
"""Tokens that the tokenizer adds at the ends of a text."""
_BATCH, _RUNS = 32, 5
_TEXTS = 256
"""Tokens in a file, at least; after its end it is read again. No server caches what it has embedded."""


def texts(folder: Path, tokens: int) -> Iterator[str]:
    """Yields texts without end, the same each time."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = sorted(word for word in tokenizer.get_vocab() if word.isalpha() and len(word) > 3)
    dice = random.Random(0)
    while True:
        yield " ".join(dice.choices(words, k=tokens - _MARKS))


def write(file: Path, folder: Path, tokens: int, batch: int) -> None:
    """Requests as `facet bench serve --dataset-name custom` reads them."""
    source = texts(folder, tokens)
    requests = ({"input": [next(source) for _ in range(batch)]} for _ in range(max(8, _TEXTS // batch)))
    file.write_bytes(b"\n".join(map(msgspec.json.encode, requests)))


def main(folder: str, dtype: str, tokens: int) -> None:
    import torch  # both are slow to import, and not for the load of other servers
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    batch = list(islice(texts(Path(folder), tokens), _BATCH))
    rates: list[float] = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        model.encode(batch, batch_size=_BATCH, show_progress_bar=False)
        rates.append(_BATCH / (time.perf_counter() - started))
    print(sorted(rates)[_RUNS // 2])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
