"""A command that writes tokenizer.json for a checkpoint that has only the files of older tokenizers.

    python -P -m models.checkpoint.tokenizer_export FOLDER TARGET [--trust-remote-code]

It is a process of its own, because only transformers can read nearly all of those files, and the server never
imports transformers.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from models.checkpoint.marian_tokenizer import SOURCE, write_marian


def export(folder: Path, target: Path, *, trust_remote_code: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # The file is written aside and moved, so that a second server never reads half of it.
    with tempfile.TemporaryDirectory(dir=target.parent) as aside:
        written = Path(aside) / "tokenizer.json"
        if (folder / SOURCE).is_file():
            write_marian(folder, written)
        else:
            _write(folder, written, trust_remote_code=trust_remote_code)
        target.mkdir(exist_ok=True)
        written.replace(target / "tokenizer.json")


def _write(folder: Path, path: Path, *, trust_remote_code: bool) -> None:
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=trust_remote_code, local_files_only=True
    )
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} has no fast form, so it cannot be written as tokenizer.json"
        )
    tokenizer.backend_tokenizer.save(str(path))


def main() -> None:
    folder, target, *flags = sys.argv[1:]
    try:
        export(Path(folder), Path(target), trust_remote_code="--trust-remote-code" in flags)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
