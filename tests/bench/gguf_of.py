"""A checkpoint in llama.cpp's own format, by its own converter.

    python tests/bench/gguf_of.py LLAMA_CPP FOLDER FILE TYPE

The converter refuses a tokenizer that it does not know by its fingerprint, as those of our checkpoints. They
are byte-level BPE, so GPT-2's way to split a text will do: the prompts of the comparison are token ids.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def main(tree: Path, folder: str, file: str, kind: str) -> None:
    sys.path[:0] = [str(tree), str(tree / "gguf-py")]
    converter = import_module("convert_hf_to_gguf")
    base = import_module("conversion.base")
    base.ModelBase.no_mtp = True  # our checkpoints have no layers that guess further tokens
    model = base.TextModel
    find = model.get_vocab_base_pre

    def find_or_guess(self: Any, tokenizer: Any) -> str:
        try:
            return find(self, tokenizer)
        except NotImplementedError:
            return "gpt-2"

    def no_sentencepiece(self: Any) -> None:
        """Tells the converter that there is no SentencePiece file, so that it takes the tokenizer.json."""
        raise FileNotFoundError

    model.get_vocab_base_pre = find_or_guess
    model._create_vocab_sentencepiece = no_sentencepiece
    sys.argv[1:] = [folder, "--outfile", file, "--outtype", kind]
    converter.main()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:5])
