"""Bodies whose texts become tokens, or whose tokens become text: ours and other servers'."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import msgspec
from msgspec import UNSET

from server.errors import too_many
from server.media.prompt import Written
from server.reading.prompts import encode_conversation, write_answered, write_chat
from server.reading.reading_context import ReadingContext
from server.reading.row_parts import with_rows
from server.requests.prompt_length import check_prompt_characters
from server.schemas.chat import ChatRequest
from server.schemas.tei import DecodeRequest, TeiTokenize
from server.schemas.tokenize import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from server.schemas.vendor_bodies.llama_cpp import LlamaTokenize
from server.text.control_tokens import CUT
from server.text.tokenizer import Tokenizer


def read_tokenize(body: TokenizeRequest, context: ReadingContext) -> bytes:
    """The answer to the request, as JSON."""
    if body.messages is None:
        written, special = Written(body.prompt or ""), True
    else:
        written, special = write_answered(body, body.messages, context), False
    if body.add_special_tokens is not None:
        special = body.add_special_tokens
    ids, placed = encode_conversation(written, context, add_special_tokens=special)
    if written.row_files:
        ids, _, _ = with_rows(ids, placed, written.row_files, context.facts)
    name = context.tokenizer.token_name
    strings = [name(id) for id in ids] if body.return_token_strs else None
    offsets = _offsets(written, context.tokenizer, special) if body.return_token_offsets else UNSET
    return msgspec.json.encode(Tokenized(len(ids), context.facts.max_model_len, ids, strings, offsets))


def _offsets(written: Written, tokenizer: Tokenizer, special: bool) -> list[tuple[int, int]] | None:
    if not written.is_plain or CUT in written.text:
        return None
    return [place or (0, 0) for _, place in tokenizer.encode_places(written.text, special)]


def read_detokenize(body: DetokenizeRequest, context: ReadingContext) -> bytes:
    """The answer to the request, as JSON."""
    return msgspec.json.encode(Detokenized(read_tokens(body.tokens, "tokens", context)))


def read_tokens(ids: list[int], field: str, context: ReadingContext, *, hides_special: bool = False) -> str:
    """The text of the tokens in a field of a body."""
    most = context.facts.limits.detokenized * context.facts.max_model_len
    if len(ids) > most:
        raise too_many(field, most, "ids", len(ids))
    context.facts.check_token_ids(ids, field)
    return context.tokenizer.decode(ids, skip_special_tokens=hides_special)


def read_llama_tokenize(body: LlamaTokenize, context: ReadingContext) -> bytes:
    """The answer to the request, as JSON."""
    ids, _ = encode_conversation(Written(body.content), context, add_special_tokens=bool(body.add_special))
    said = context.tokenizer.token_bytes
    pieces = [{"id": id, "piece": _piece(said(id))} for id in ids] if body.with_pieces else ids
    return msgspec.json.encode({"tokens": pieces})


def _piece(said: bytes) -> str | list[int]:
    """The text of a token, or its bytes if they are no whole characters."""
    try:
        return said.decode()
    except UnicodeDecodeError:
        return [*said]


def read_llama_detokenize(body: DetokenizeRequest, context: ReadingContext) -> bytes:
    """The answer to the request, as JSON."""
    return msgspec.json.encode({"content": read_tokens(body.tokens, "tokens", context)})


def read_template(body: ChatRequest, context: ReadingContext) -> bytes:
    """The text that the chat template makes of a conversation, as JSON."""
    return msgspec.json.encode({"prompt": write_chat(body, context).plain_text})


def read_tei_tokenize(body: TeiTokenize, context: ReadingContext) -> bytes:
    """The tokens of each text, with their places in it, as JSON."""
    prompt = body.prompt("embed", context.facts)
    texts = [prompt + text for text in body.texts]
    for text in texts:
        check_prompt_characters(text, context.facts, context.tokenizer)
    special = body.add_special_tokens
    return msgspec.json.encode([_simple_tokens(text, context.tokenizer, special) for text in texts])


def _simple_tokens(text: str, tokenizer: Tokenizer, special: bool) -> list[dict[str, Any]]:
    byte_at = [0, *accumulate(len(character.encode()) for character in text)]
    found: list[dict[str, Any]] = []
    for id, place in tokenizer.encode_places(text, special):
        said = tokenizer.token_name(id) if place is None else text[slice(*place)]
        start, stop = (None, None) if place is None else (byte_at[place[0]], byte_at[place[1]])
        found.append({"id": id, "text": said, "special": place is None, "start": start, "stop": stop})
    return found


def read_decode(body: DecodeRequest, context: ReadingContext) -> bytes:
    """The text of each list of tokens, as JSON."""
    hides = body.skip_special_tokens
    return msgspec.json.encode([read_tokens(ids, "ids", context, hides_special=hides) for ids in body.lists])
