"""Small tokenizers, one of each kind that models come with, made of a few lines of text."""

from collections.abc import Callable

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer

TEXTS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps",
    "Grüße aus Köln! Straße, naïve café, 日本語 and emoji 🙂🚀",
    "  leading spaces,   inner   spaces, and numbers 1234567890",
]
SPECIALS = ["<s>", "</s>", "<|im end|>"]


def byte_level() -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(TEXTS, trainer)
    return _with_specials(raw)


def sentencepiece() -> tokenizers.Tokenizer:
    """A tokenizer like Llama 2's: ▁ for spaces, one before the text, and bytes for unknown characters."""
    words = ["▁the", "▁quick", "▁", "the", "fox", "▁fox", "é", "ü", "▁▁", *"abcdefghijklmnopqrstuvwxyz,.!"]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = [(name, 0.0 if i < 257 else -float(i)) for i, name in enumerate(names)]
    raw = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_specials(raw)


def metaspace() -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, show_progress=False, unk_token="<unk>")
    trainer.special_tokens = [AddedToken("<unk>")]
    raw.train_from_iterator(TEXTS, trainer)
    return _with_specials(raw)


def wordpiece() -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=150, show_progress=False)
    trainer.special_tokens = [AddedToken("[UNK]")]
    raw.train_from_iterator(TEXTS, trainer)
    return _with_specials(raw)


def word_ends() -> tokenizers.Tokenizer:
    """A tokenizer like that of the first GPT: a word's last token ends in </w>."""
    raw = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(vocab_size=150, end_of_word_suffix="</w>", show_progress=False)
    trainer.special_tokens = [AddedToken("<unk>")]
    raw.train_from_iterator(TEXTS, trainer)
    return _with_specials(raw)


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
    "word_ends": word_ends,
}


def ours(raw: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(raw, ChatTemplate({}, {}), named_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def _with_specials(raw: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    raw.add_special_tokens(SPECIALS)
    raw.add_tokens([AddedToken("<plain>"), AddedToken("日本")])
    return raw
