"""Converts text to token ids and back, with the `tokenizers` library alone: no transformers and no torch."""

from __future__ import annotations

import copy
import json
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import tokenizers

from engine_core.protocol import Spelling
from server.errors import BadRequest
from server.text.chat_template import ChatTemplate
from server.text.control_tokens import CUT, TextDivider, control_words
from server.text.detokenizer import ByteDecoding, ByteText, MarkedText, TextState, WindowText, byte_decoding

LONG_TEXT = 64 << 10
"""A text of so many characters is encoded in a thread: this much takes about 20 ms."""

_MOST_TEMPLATES = 64
_PROBE = "Two  words, 1234567 x² Æther's\tnaïve\n\n 你好世界 привет नमस्ते 🦊 <b>f(x)=y_1;</b>\r\n"
"""A text by whose tokens two tokenizers with one vocabulary are told apart."""

TokenIds = list[int] | bytes
"""Token ids: a list, or packed as 32-bit numbers where very many of them come from another process."""
_ID_BYTES = 4


def pack(ids: TokenIds) -> bytes:
    return ids if isinstance(ids, bytes) else array("i", ids).tobytes()


def unpack(ids: TokenIds) -> list[int]:
    return array("i", ids).tolist() if isinstance(ids, bytes) else ids


def count_ids(ids: TokenIds) -> int:
    return len(ids) // _ID_BYTES if isinstance(ids, bytes) else len(ids)


class _Bytes(dict[int, bytes]):
    """The bytes of each token, computed once.

    It knows no `Tokenizer`: a circle of references would keep the megabytes of one that is not used any more
    until the collector finds it.
    """

    def __init__(
        self, model: tokenizers.Tokenizer, decoding: ByteDecoding | None, hidden: Set[int] = frozenset()
    ) -> None:
        """`hidden` tokens have none."""
        super().__init__()
        self._model, self._decoding, self._hidden = model, decoding, hidden

    def __missing__(self, id: int) -> bytes:
        data = self[id] = b"" if id in self._hidden else self._find(id)
        return data

    def _find(self, id: int) -> bytes:
        token = self._model.id_to_token(id)
        if token is None:  # models often have more rows than their tokenizer has tokens
            return b""
        if self._decoding is None:
            return self._model.decode([id], skip_special_tokens=False).encode()
        return self._decoding.token_bytes(token)


class Tokenizer:
    writes = True
    """Whether there is text of tokens."""

    def __init__(
        self,
        model: tokenizers.Tokenizer,
        chat: ChatTemplate,
        *,
        named_tokens: dict[str, str] | None = None,
        add_bos: bool = False,
        path: str = "",
        response_template: Mapping[str, Any] | None = None,
        special_in_messages: bool = False,
    ) -> None:
        """`path` is the tokenizer.json from which `model` was read.
        `special_in_messages`: control tokens that users write in messages stay control tokens.

        `response_template` is what the checkpoint says of the form of its answers, for transformers.
        """
        model.no_truncation()
        model.no_padding()
        self.chat = chat
        self.path = path
        self.response_template = response_template
        self._model = model
        _mark_special(model, (named_tokens or {}).values())
        added = model.get_added_tokens_decoder()
        self.added_tokens = {token.content: id for id, token in added.items()}
        """The tokens that were added to the vocabulary, special or not, by their text."""
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        chat.divider = None if special_in_messages else _divider(model, added.values())
        self.vocab_size = model.get_vocab_size()
        vocabulary = model.get_vocab()
        self.largest_id = max(vocabulary.values(), default=0)
        self.longest_token = max(map(len, vocabulary), default=1)
        """Length of the longest token: a text of more than n times this many characters has more than n
        tokens."""
        decoder = model.decoder  # alone: the whole takes a third of a second to be written and read
        self._decoding = byte_decoding(None if decoder is None else json.loads(decoder.__getstate__()))
        self._bytes = _Bytes(model, self._decoding)
        self._visible_bytes = _Bytes(model, self._decoding, self.special_ids)
        self._written: dict[str, Tokenizer] = {}
        """The same tokenizer with other templates."""
        self.eos_id = self.token_id((named_tokens or {}).get("eos_token", ""))
        self._prefix = self._missing_bos(named_tokens or {}) if add_bos else []

    def written_by(self, template: str) -> Tokenizer:
        """The same tokenizer with another chat template, or this one for ""."""
        if not template:
            return self
        if template not in self._written:
            while len(self._written) >= _MOST_TEMPLATES:
                del self._written[next(iter(self._written))]
            own = self._written[template] = copy.copy(self)
            own.chat, own._written = self.chat.with_default(template), {}
        return self._written[template]

    def difference(self, path: Path) -> str:
        """A clause on what the tokenizer of another file does otherwise; empty if nothing is found.

        Raises ValueError if it cannot be read.
        """
        if path.read_bytes() == Path(self.path).read_bytes():
            return ""
        try:
            other = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"it cannot be read: {error}") from error
        other.no_truncation()
        other.no_padding()
        odd = sorted(dict(self._model.get_vocab().items() ^ other.get_vocab().items()))
        if odd:
            return f"{len(odd)} tokens are not the same, such as {', '.join(map(repr, odd[:3]))}"
        first, second = (each.encode(_PROBE, add_special_tokens=False).ids for each in (self._model, other))
        return "" if first == second else "it cuts texts into other tokens"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if CUT in text:
            return self._encode_divided(text, add_special_tokens)
        # The batch call lets other threads run meanwhile and skips the offsets, which nobody here needs.
        ids = self._model.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return [*self._prefix, *ids] if self._prefix and add_special_tokens else ids

    def encode_many(
        self,
        texts: Sequence[str],
        add_special_tokens: bool = True,
        keep: int | None = None,
        *,
        left: bool = False,
    ) -> list[list[int]]:
        """Encodes each text; `keep` bounds its tokens, special ones included, `left` drops its beginning."""
        encodings = self._model.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        prefix = self._prefix if add_special_tokens else []
        room = 1 << 60 if keep is None else keep - len(prefix)
        special = self._model.num_special_tokens_to_add(False) if add_special_tokens else 0
        found: list[list[int]] = []
        for text, encoding in zip(texts, encodings, strict=True):
            if CUT in text:
                found.append(self._encode_divided(text, add_special_tokens, keep, left=left))
                continue
            if len(encoding.ids) > room:
                bare = self._encode_bare(text, room - special, left=left)
                encoding = self._model.post_process(bare, None, add_special_tokens)
            found.append([*prefix, *encoding.ids][:keep])
        return found

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], keep: int | None = None, *, left: bool = False
    ) -> list[tuple[list[int], int]]:
        """Encodes each pair of texts as one, and finds where the second begins if the model is told.

        The longer text of too long a pair is cut first, until both are as long.
        """
        encodings = self._model.encode_batch_fast(list(pairs))
        found: list[tuple[list[int], int]] = []
        for (first, second), encoding in zip(pairs, encodings, strict=True):
            if keep is not None and len(encoding.ids) + len(self._prefix) > keep:
                room = keep - len(self._prefix) - self._model.num_special_tokens_to_add(True)
                one = self._encode_bare(first, None, left=left)
                two = self._encode_bare(second, None, left=left)
                kept = _shares(len(one.ids), len(two.ids), max(0, room))
                for part, size in zip((one, two), kept, strict=True):
                    part.truncate(size, direction="left" if left else "right")
                encoding = self._model.post_process(one, two, True)
            second_at = encoding.type_ids.index(1) if 1 in encoding.type_ids else 0
            found.append(([*self._prefix, *encoding.ids], second_at and second_at + len(self._prefix)))
        return found

    def encode_words(self, texts: Sequence[Sequence[str]]) -> list[tuple[list[int], list[int | None]]]:
        """Encodes texts that are divided into words: their tokens, and the index of the word of each."""
        encodings = self._model.encode_batch([[*words] for words in texts], is_pretokenized=True)
        return [(encoding.ids, encoding.word_ids) for encoding in encodings]

    def encode_places(self, text: str, add_special_tokens: bool) -> list[tuple[int, tuple[int, int] | None]]:
        """Encodes a text, and finds the characters for which each token stands; None for special tokens."""
        found = self._model.encode(text, add_special_tokens=add_special_tokens)
        entries = zip(found.ids, found.offsets, found.special_tokens_mask, strict=True)
        before = [(id, None) for id in self._prefix] if add_special_tokens else []
        return [*before, *((id, None if special else place) for id, place, special in entries)]

    def cut_text(self, text: str, tokens: int) -> str:
        """The beginning of a text that has that many tokens."""
        offsets = self._model.encode(text, add_special_tokens=False).offsets
        return text if len(offsets) <= tokens else text[: offsets[tokens - 1][1]]

    def encode_behind(self, text: str) -> list[int]:
        """Encodes a text that stands behind another one, without special tokens, and without the space that
        some tokenizers write before a text."""
        pieces = text.split(CUT)
        [line, *found] = self._model.encode_batch_fast(
            ["\n", *(f"\n{piece}" for piece in pieces)], add_special_tokens=False
        )
        size, ids = len(line.ids), list[int]()
        for piece, both in zip(pieces, found, strict=True):
            alike = both.ids[:size] == line.ids
            ids += both.ids[size:] if alike else self._encode_bare(piece, None, left=False).ids
        return ids

    def _encode_divided(
        self, text: str, add_special_tokens: bool, keep: int | None = None, *, left: bool = False
    ) -> list[int]:
        """Encodes the pieces of a text with marks, so that no token goes over one of these."""
        first, _, rest = text.partition(CUT)
        ids = self._encode_bare(first, None, left=False).ids + self.encode_behind(rest)
        before, behind = self._around() if add_special_tokens else ([], [])
        if keep is not None and len(ids) > (room := max(0, keep - len(before) - len(behind))):
            ids = ids[len(ids) - room :] if left else ids[:room]
        return [*before, *ids, *behind]

    def _around(self) -> tuple[list[int], list[int]]:
        """Returns the special tokens before and behind a text."""
        one = self._model.encode(_PROBE)
        own = [place for place, special in enumerate(one.special_tokens_mask) if not special]
        return [*self._prefix, *one.ids[: own[0]]], one.ids[own[-1] + 1 :]

    def _encode_bare(self, text: str, keep: int | None, *, left: bool) -> tokenizers.Encoding:
        encoding = self._model.encode_batch_fast([text], add_special_tokens=False)[0]
        if keep is not None:
            encoding.truncate(max(0, keep), direction="left" if left else "right")
        return encoding

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        state = self.text_state((), skip_special_tokens)
        return state.push(ids) + state.flush()

    def text_state(
        self,
        prompt: Sequence[int],
        skip_special_tokens: bool = True,
        marks: Mapping[int, str] | None = None,
    ) -> TextState:
        """The state of the text that follows `prompt`, to be given its tokens as they come.

        `marks` are characters that stand for tokens, shown or not.
        """
        if marks is not None:
            return MarkedText(self.text_state(prompt, skip_special_tokens), marks)
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        if self._decoding is None:
            return WindowText(self._decode_all, lambda id: id not in hidden, prompt[-WindowText.LOOK_BACK :])
        lookup = self._visible_bytes if skip_special_tokens else self._bytes
        at_start = self._decoding.strip != 0 and all(id in hidden for id in prompt)
        return ByteText(self._decoding, lookup.__getitem__, at_start=at_start)

    def token_bytes(self, id: int) -> bytes:
        return self._bytes[id]

    def spelling(self, ends: Sequence[int], marks: Iterable[int] = ()) -> Spelling:
        """How tokens are spelled, for an engine. `ends` end answers; `marks` are no text either."""
        return Spelling(
            tokens=[self.token_bytes(id) for id in range(self.largest_id + 1)],
            special=sorted({*self.special_ids, *marks}),
            ends=list(ends),
            tokenizer=self.path,
        )

    def token_text(self, id: int) -> str:
        """The text of one token on its own, special or not, with U+FFFD for bytes that are no character."""
        return self._bytes[id].decode("utf-8", "replace")

    def token_name(self, id: int) -> str:
        """The token as the vocabulary spells it."""
        return self._model.id_to_token(id) or ""

    def token_id(self, name: str) -> int | None:
        return self._model.token_to_id(name)

    def _decode_all(self, ids: Sequence[int]) -> str:
        return self._model.decode(list(ids), skip_special_tokens=False)

    def _missing_bos(self, named: dict[str, str]) -> list[int]:
        """The token that tokenizer_config.json wants before each text, if tokenizer.json does not add it."""
        bos = self._model.token_to_id(named.get("bos_token", ""))
        if bos is None or self._model.encode("a").ids[:1] == [bos]:
            return []
        return [bos]


class NoTokenizer(Tokenizer):
    """Stands for a tokenizer that is not loaded: prompts are token ids, and so are answers."""

    writes = False

    def __init__(self, chat: ChatTemplate) -> None:
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel({}, ""))
        model.decoder = tokenizers.decoders.ByteLevel()
        super().__init__(model, chat)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise BadRequest("This server has no tokenizer (--skip-tokenizer-init): send token ids, not text.")

    def encode_many(
        self,
        texts: Sequence[str],
        add_special_tokens: bool = True,
        keep: int | None = None,
        *,
        left: bool = False,
    ) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], keep: int | None = None, *, left: bool = False
    ) -> list[tuple[list[int], int]]:
        return [(self.encode(first), 0) for first, _ in pairs]


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """The lengths to which two texts are cut so that both fit."""
    shorter = min(first, second, room // 2)
    longer = min(max(first, second), room - shorter)
    return (shorter, longer) if first <= second else (longer, shorter)


def _divider(model: tokenizers.Tokenizer, added: Collection[tokenizers.AddedToken]) -> TextDivider | None:
    """Returns what divides the control tokens that users write in messages; None if there are none."""
    words = control_words((token.content, token.special) for token in added)
    normalizer = model.normalizer
    folded = {token.content for token in added if token.normalized} & words
    if normalizer is None or not folded:
        return TextDivider(words) if words else None
    return TextDivider(words.union(map(normalizer.normalize_str, folded)), normalizer.normalize_str)


def _mark_special(model: tokenizers.Tokenizer, names: Iterable[str]) -> None:
    """Marks tokens as special that the configuration names and tokenizer.json has as ordinary ones."""
    known = {token.content for token in model.get_added_tokens_decoder().values()}
    missing = [
        name for name in dict.fromkeys(names) if name not in known and model.token_to_id(name) is not None
    ]
    model.add_special_tokens(missing)
