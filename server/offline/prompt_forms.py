"""The forms in which programs hand over prompts: texts, token ids, vLLM's dictionaries, conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from numbers import Integral
from typing import Any, TypedDict, TypeVar, cast, get_args

import msgspec
from pydantic import BaseModel, TypeAdapter, ValidationError

from server.errors import BadRequest, for_programs
from server.media.inline_files import InlineFiles
from server.offline.media_forms import Given, listed, read_media, with_files
from server.requests.pooling import PoolingParams, Source
from server.requests.scoring import Side
from server.schemas.body import invalid_body
from server.schemas.score_and_rerank import Texts
from server.text.chat_template import AskedFormat
from server.text.tokenizer import LONG_TEXT


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter by its name, a number from 1 on, and its folder. The number means nothing here."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"id must be > 0, got {self.lora_int_id}")
        if not self.lora_name or not self.lora_path:
            raise ValueError("a LoRARequest needs a name and the folder of an adapter")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id


Adapters = LoRARequest | Sequence[LoRARequest | None] | None
"""An adapter for all prompts, or one, or None, for each."""


class TextPrompt(TypedDict, total=False):
    """A prompt: a text, token ids, or embeddings."""

    prompt: str
    """A text with the family's placeholder for each picture, video or sound. Beside token ids it is shown in
    the output, and not read."""
    prompt_token_ids: Sequence[int]
    prompt_embeds: Any
    """Embeddings in place of tokens [N, hidden size], as a tensor of torch or an array of NumPy."""
    multi_modal_data: Mapping[str, Any]
    """{"image": ...} with a picture or a list of them: of Pillow, arrays, paths of files, their bytes, or
    with enable_mm_embeds embeddings of them: [N, width], or {"image_embeds": ..., "image_grid_thw": ...}.
    Videos are "video", and sounds "audio": samples at 16 kHz, (samples, rate), paths or bytes."""
    mm_processor_kwargs: dict[str, Any]
    """Settings of the model's processor of media."""
    cache_salt: str


TokensPrompt = TextPrompt
"""vLLM's name for one with token ids."""


class ContentPrompt(TypedDict):
    content: str | Sequence[Mapping[str, Any]]
    """What is compared, as the content of a message: texts and pictures."""


PromptLike = str | Sequence[int] | TextPrompt
Prompts = PromptLike | Sequence[PromptLike]
Message = Mapping[str, Any]

Params = TypeVar("Params")
Fields = TypeVar("Fields", bound=msgspec.Struct)
B = TypeVar("B", bound=BaseModel)

_FORMS = (
    "a prompt is a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}, each of them "
    "alone or in a list"
)
_UNSUPPORTED = ("multi_modal_uuids", "encoder_prompt", "decoder_prompt", "token_type_ids")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt before it is encoded: a text, or token ids, perhaps with a text to show for them."""

    text: str | None = None
    ids: list[int] | None = None
    salt: str = ""
    """Cached prefixes are shared only among prompts of the same salt."""
    media: Sequence[Given] = ()
    """Items, each of which has a place in the text."""
    settings: Mapping[str, Any] | None = None
    """Settings of the processor for these."""
    rows: Any = None
    """Embeddings in place of a text and of ids."""

    @property
    def source(self) -> Source:
        return self.ids if self.ids is not None else self.text or ""

    @property
    def is_slow(self) -> bool:
        """Whether others need not wait until it is read: it has media, or is long."""
        return bool(self.media) or len(self.text or "") >= LONG_TEXT


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation to answer, and fields of a request for a chat that say how it is written."""

    messages: Sequence[Message]
    template: Mapping[str, Any] = field(default_factory=dict[str, Any])
    content_format: AskedFormat | None = None
    salt: str = ""

    @property
    def is_slow(self) -> bool:
        return any(isinstance(message.get("content"), list) for message in self.messages)


@contextmanager
def _as_invalid_body() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False)) from None


def validated(kind: type[B], given: Mapping[str, Any]) -> B:
    """A body, or a part of one, with these fields. Raises BadRequest."""
    with _as_invalid_body():
        return kind.model_validate(given)


def read_prompt(given: object) -> Prompt:
    """Reads one prompt in any of its forms; raises TypeError."""
    match given:
        case str():
            return Prompt(given)
        case Mapping():
            return _from_mapping(given)
        case _ if (ids := _ids(given)) is not None:
            return Prompt(ids=ids)
        case _:
            raise TypeError(f"{_FORMS}; got {_shown(given)}")


def read_prompts(given: object) -> list[Prompt]:
    """Reads one prompt, or a sequence of prompts; raises TypeError."""
    given = listed(given)
    if isinstance(given, str | Mapping) or (given and _ids(given) is not None):
        return [read_prompt(given)]
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise TypeError(f"{_FORMS}; got {_shown(given)}")
    return [read_prompt(one) for one in given]


_sides = TypeAdapter[list[Side]](Texts)


def read_sides(given: object, files: InlineFiles) -> list[Side]:
    """Reads what is compared: a text, a content with pictures, or a sequence of these; raises TypeError, and
    BadRequest for a wrong content."""
    asked: list[object] = []
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    for one in cast("Sequence[Any]", given if is_list else [given]):
        match one:
            case str():
                asked.append(one)
            case {"prompt": str() as text, **rest} if not any(rest.values()):
                asked.append(text)
            case {"content": str() | list(), **rest} if not rest:
                asked.append(with_files(one, files))
            case _:
                raise TypeError(
                    "texts and contents are compared: give a text, {'prompt': text}, {'content': [...]} with "
                    f"text and pictures, or a list of these; got {_shown(one)}"
                )
    with _as_invalid_body():
        return _sides.validate_python(asked)


def read_conversations(given: object) -> list[Sequence[Message]]:
    """Reads one conversation, which is a list of messages, or a sequence of conversations."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TypeError(f"a conversation is a list of messages; got {_shown(given)}")
    conversations = [given] if given and isinstance(given[0], Mapping) else given
    for one in conversations:
        if not isinstance(one, Sequence) or not all(isinstance(message, Mapping) for message in one):
            raise TypeError(f"a conversation is a list of messages; got {_shown(one)}")
    return list(conversations)


def for_each(
    name: str, kind: type[Any], given: Params | Sequence[Params] | None, default: Params, count: int
) -> Sequence[Params]:
    """The values of the argument `name` for each of `count` prompts, from one for all or one for each."""
    if given is None or isinstance(given, kind):
        return [default if given is None else cast("Params", given)] * count
    if not isinstance(given, Sequence) or not all(one is default or isinstance(one, kind) for one in given):
        raise TypeError(
            f"{name} is one {kind.__name__} for all prompts, or a list of them; got {_shown(given)}"
        )
    if len(given) != count:
        raise ValueError(f"{name}: {len(given)} for {count} prompts; give one for all, or one for each")
    return given


@for_programs()
def read_params(given: Sequence[Fields]) -> list[Fields]:
    """Parameters with values as HTTP requests have them: NumPy's numbers become Python's, and None the
    default where a field has no None. Raises BadRequest for other types, by which an engine would break."""
    read = {at: _plain_params(one) for at, one in {id(one): one for one in given}.items()}
    return [read[id(one)] for one in given]


def _plain_params(given: Fields) -> Fields:
    if not isinstance(given, msgspec.Struct):
        return given  # which the request refuses by its name
    optional = _optional(type(given))
    asked = {name: getattr(given, name) for name in given.__struct_fields__}
    values = {name: _plain(value) for name, value in asked.items() if value is not None or name in optional}
    values |= {name: 1 for name in ("logprobs", "prompt_logprobs") if values.get(name) is True}  # as in vLLM
    try:
        return msgspec.convert(values, type(given), strict=False, from_attributes=True)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{type(given).__name__}: {error}") from None


@cache
def _optional(kind: type[msgspec.Struct]) -> set[str]:
    """The fields of a struct that may be None."""
    fields = msgspec.structs.fields(kind)
    return {field.name for field in fields if field.type is object or type(None) in get_args(field.type)}


def _plain(value: Any) -> Any:
    match value:
        case msgspec.Struct():
            return _plain_params(value)
        case Enum():
            return value.value
        case list() | tuple():
            return [_plain(each) for each in cast("Sequence[Any]", value)]
        case dict():
            return {_plain(key): _plain(each) for key, each in cast("dict[Any, Any]", value).items()}
        case _:
            return listed(value)


def _from_mapping(given: Mapping[Any, Any]) -> Prompt:
    salt = given.get("cache_salt") or ""
    if (rows := given.get("prompt_embeds")) is not None:
        if set(given) - {"prompt_embeds", "cache_salt"}:
            raise TypeError("a prompt with prompt_embeds has no text, no token ids and no pictures")
        return Prompt(salt=salt, rows=rows)
    for name, value in given.items():
        if name in _UNSUPPORTED and value:
            raise TypeError(f"a prompt's {name!r} is not supported yet; leave it out")
        if name not in TextPrompt.__annotations__ and name not in _UNSUPPORTED:
            raise TypeError(f"a prompt has no field {name!r}: {_FORMS}")
    text, asked = given.get("prompt"), given.get("prompt_token_ids")
    ids = _ids(asked)
    if (text is None and ids is None) or (ids is None and asked is not None):
        raise TypeError(f"{_FORMS}; got {_shown(given)}")
    for name, value in (("text", text or ""), ("cache_salt", salt)):
        if not isinstance(value, str):
            raise TypeError(f"a prompt's {name} is a string; got {_shown(value)}")
    media = read_media(given["multi_modal_data"]) if given.get("multi_modal_data") else ()
    if media and ids is not None:
        raise TypeError("a prompt with pictures is a text, in which each has its place, not token ids")
    return Prompt(text, ids, salt, media, given.get("mm_processor_kwargs"))


def _ids(given: object) -> list[int] | None:
    """The token ids of a sequence or array of whole numbers, numpy's too; None if it is something else."""
    given = listed(given)
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return None
    if not all(isinstance(id, Integral) and not isinstance(id, bool) for id in given):
        return None
    return [int(id) for id in given]


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:79] + '…'}"


class ReadOptions(TypedDict, total=False):
    """Options of a call for all of its texts. None leaves an option to the parameters of each text."""

    prompt_name: str | None
    """The name of one of the model's instructions, which is written before each text."""
    truncate_prompt_tokens: int | None
    """Cut longer texts to so many tokens, or with -1 to what the model can read; None refuses these."""
    truncation_side: str | None
    """ "left" drops the beginning of a text that is cut; the default drops its end."""


class TextOptions(ReadOptions, total=False):
    """Keyword arguments of every call that pools."""

    use_tqdm: bool
    """Show a bar, if a terminal is there to show it."""
    priority: Sequence[int] | None
    """A number for each prompt; lower runs earlier, under scheduling_policy="priority"."""
    lora_request: Adapters
    """The adapter of all prompts, or that of each."""


class PoolingOptions(TextOptions, total=False):
    pooling_params: PoolingParams | Sequence[PoolingParams] | None
