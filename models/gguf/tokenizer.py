"""The tokenizer of a GGUF file in the form of tokenizer.json and tokenizer_config.json. No torch.

The ids of a text are those of the tokenizer that the file was converted from.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable, Mapping, Sequence

from models.gguf.file import GgufFile
from models.gguf.pre_tokenizers import CUTTINGS, Cutting
from models.gguf.vocabulary import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    chat_templates,
    read_vocabulary,
)
from models.plain_files import FileError

Json = dict[str, object]

_NEXT_STEP = "name the model's own tokenizer with --tokenizer"
_BLANK = "\u2581"
"""The sign that stands for a space in vocabularies of SentencePiece."""
_SPECIALS = {
    "bos_token": ("bos",),
    "eos_token": ("eos",),
    "unk_token": ("unknown",),
    "pad_token": ("padding",),
    "cls_token": ("cls",),
    "sep_token": ("separator", "seperator"),
    "mask_token": ("mask",),
}
"""Special tokens by their names in tokenizer_config.json, and those of GGUF, of which one is misspelt."""


def tokenizer_json(file: GgufFile) -> Json:
    """The content of tokenizer.json. Raises FileError if the tokenizer is of an unknown kind."""
    vocabulary = read_vocabulary(file)
    if vocabulary.model not in _MODELS:
        raise FileError(
            f"{file.path}: tokenizer.ggml.model is {vocabulary.model!r}, but only {', '.join(_MODELS)} are "
            f"read: {_NEXT_STEP}"
        )
    parts = _MODELS[vocabulary.model](vocabulary)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        **parts,
    }


def tokenizer_config(file: GgufFile) -> Json:
    """The content of tokenizer_config.json: names of special tokens, and chat templates."""
    vocabulary = read_vocabulary(file)
    named = {name: vocabulary.special(*keys) for name, keys in _SPECIALS.items()}
    if vocabulary.model == "bert":  # BERT's names for the tokens around a text
        named["cls_token"] = named["cls_token"] or named["bos_token"]
        named |= {"bos_token": None, "eos_token": None}
    config: Json = {name: text for name, text in named.items() if text is not None}
    if templates := chat_templates(file.metadata):
        config["chat_template"] = templates
    return config


def _added_tokens(vocabulary: Vocabulary) -> list[Json]:
    """Tokens that are found in a text before it is cut: special ones, and those that users have defined."""
    added: list[Json] = []
    for id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        merged = vocabulary.model in ("llama", "gemma4") and _is_blanks(token)
        if token and (kind == CONTROL or (kind in (UNKNOWN, USER_DEFINED) and not merged)):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": id, "content": token, **flags, "special": kind != USER_DEFINED})
    return added


def _is_blanks(token: str) -> bool:
    """Whether this is a run of spaces, which SentencePiece's merges make."""
    return len(token) > 1 and not token.strip(" " + _BLANK)


def _byte_level(vocabulary: Vocabulary) -> Json:
    cutting = _cutting(vocabulary)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    merges = _said_merges(vocabulary)
    cuts: list[Json] = [
        {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False}
        for cut in cutting.expressions
    ]
    return {
        "normalizer": {"type": "NFC"} if cutting.composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, byte_level]},
        "decoder": {**byte_level, "use_regex": True},
        "post_processor": _template(
            vocabulary, bos=cutting.adds_bos or cutting.adds_ends, eos=cutting.adds_ends
        ),
        "model": _bpe(vocabulary.ids(), merges, ignore_merges=cutting.whole_words),
    }


def _cutting(vocabulary: Vocabulary) -> Cutting:
    name = vocabulary.get("pre") or "default"
    if name not in CUTTINGS:
        raise FileError(
            f"{vocabulary.file.path}: tokenizer.ggml.pre is {name!r}, which is not known here, only "
            f"{', '.join(CUTTINGS)}: {_NEXT_STEP}"
        )
    return CUTTINGS[str(name)]


def _said_merges(vocabulary: Vocabulary) -> object:
    merges = vocabulary.get("merges")
    if not isinstance(merges, list):
        raise FileError(f"{vocabulary.file.path}: the field tokenizer.ggml.merges is missing: {_NEXT_STEP}")
    return merges


def _bpe(ids: Mapping[str, int], merges: object, **others: object) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": ids,
        "merges": merges,
        **others,
    }


def _sentence_piece(vocabulary: Vocabulary) -> Json:
    """SentencePiece's BPE, with bytes where no token fits. Gemma 4's files have merges, others scores."""
    prefix = vocabulary.flag("add_space_prefix", True)
    ids = {
        token.replace(" ", _BLANK) if _is_blanks(token) else token: id
        for token, id in vocabulary.ids().items()
    }
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    before: list[Json] = [{"type": "Prepend", "prepend": _BLANK}] if prefix else []
    merges = _said_merges(vocabulary) if vocabulary.model == "gemma4" else _merges(vocabulary, ids)
    unknown = vocabulary.special("unknown")
    if unknown is None and UNKNOWN in vocabulary.kinds:
        unknown = vocabulary.tokens[list(vocabulary.kinds).index(UNKNOWN)]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, replace]},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "post_processor": _template(vocabulary, bos=True, eos=False),
        "model": _bpe(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _merges(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges that scores mean: of two neighbours, first those whose union has the best score.

    Gemma's scores do not say in which order tokens were learned, but their ids do.
    """
    by_id = str(vocabulary.file.metadata.get("general.architecture")).startswith("gemma")
    found: list[tuple[float, int, int, str, str]] = []
    for token, id in ids.items():
        score = -id if by_id else vocabulary.scores[id]
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [
            (ids[left], ids[right], left, right) for left, right in halves if left in ids and right in ids
        ]
        found += ((score, len(left), len(right), left, right) for _, _, left, right in sorted(pairs))
    # Python's sort keeps the order of equals also when it is reversed.
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in found]


def _word_piece(vocabulary: Vocabulary) -> Json:
    """BERT's: GGUF marks the beginnings of words where the original marks what follows them."""
    ids: dict[str, int] = {}
    plain: list[str] = []
    for id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        if kind == CONTROL or (token.startswith("[") and token.endswith("]")):
            ids.setdefault(token, id)
            continue
        begins = token.startswith(_BLANK)
        plain.append(token)
        ids.setdefault(token[1:] if begins else f"##{token}", id)
    lower = vocabulary.flag("normalizer.lowercase", not any(token != token.lower() for token in plain))
    unknown = vocabulary.special("unknown") or "[UNK]"
    first = vocabulary.special("cls", "bos") or "[CLS]"
    last = vocabulary.special("separator", "seperator") or "[SEP]"
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": vocabulary.get("normalizer.strip_accents"),
            "lowercase": lower,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "post_processor": _between(vocabulary, [first], [last], [], types=True),
        "model": {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": ids,
        },
    }


def _unigram(vocabulary: Vocabulary) -> Json:
    """SentencePiece's unigrams, as in XLM-RoBERTa and T5."""
    unknown = next((id for id, kind in enumerate(vocabulary.kinds) if kind == UNKNOWN), None)
    charsmap = vocabulary.get("precompiled_charsmap")
    before: list[Json] = []
    if isinstance(charsmap, array):
        text = base64.b64encode(bytes(int(one) & 255 for one in charsmap)).decode()
        before.append({"type": "Precompiled", "precompiled_charsmap": text})
    blanks = {
        "type": "Metaspace",
        "replacement": _BLANK,
        "prepend_scheme": "always" if vocabulary.flag("add_space_prefix", True) else "never",
        "split": True,
    }
    return {
        "normalizer": {"type": "Sequence", "normalizers": before} if before else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, blanks]},
        "decoder": blanks,
        "post_processor": _template(vocabulary, bos=False, eos=True),
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": list(zip(vocabulary.tokens, vocabulary.scores, strict=True)),
            "byte_fallback": False,
        },
    }


_MODELS: Mapping[str, Callable[[Vocabulary], Json]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
    "bert": _word_piece,
    "t5": _unigram,
    "gemma4": _sentence_piece,
}


def _template(vocabulary: Vocabulary, *, bos: bool, eos: bool) -> Json | None:
    """What is added to a text; `bos` and `eos` count where the file does not say."""
    first = vocabulary.special("bos") if vocabulary.flag("add_bos_token", bos) else None
    last = vocabulary.special("eos") if vocabulary.flag("add_eos_token", eos) else None
    between = [last] if first and last else []
    return _between(vocabulary, [first] if first else [], [last] if last else [], between, types=False)


def _between(
    vocabulary: Vocabulary,
    before: Sequence[str],
    after: Sequence[str],
    between: Sequence[str],
    *,
    types: bool,
) -> Json | None:
    """The post-processor that puts tokens around a text; `between` are more of them, within a pair."""
    if not before and not after:
        return None

    def tokens(texts: Sequence[str], kind: int) -> list[Json]:
        return [{"SpecialToken": {"id": text, "type_id": kind}} for text in texts]

    second = int(types)
    single = [*tokens(before, 0), {"Sequence": {"id": "A", "type_id": 0}}, *tokens(after, 0)]
    pair = [
        *single,
        *tokens(between, second),
        {"Sequence": {"id": "B", "type_id": second}},
        *tokens(after, second),
    ]
    known = {
        text: {"id": text, "ids": [vocabulary.tokens.index(text)], "tokens": [text]}
        for text in (*before, *after)
    }
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known}
