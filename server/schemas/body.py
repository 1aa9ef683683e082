"""Checks which fields a body has: nothing that a client sends is silently ignored.

A field is known, by our name or by another server's; or we do not support it yet, and it is refused by name
unless its value asks for nothing; or it has no meaning for a server like this one and is accepted; or it is
unknown, of which `server.schemas.unknown_fields` decides. Lists and objects have a greatest length, which is
checked before their entries are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, LiteralString, NamedTuple, cast

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    Strict,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from server.errors import BadRequest, too_many
from server.schemas.unknown_fields import Dialects, FieldNotes, find_unknown


def _read_flag(value: object) -> object:
    spelled = value.lower() if isinstance(value, str) else ""
    return spelled == "true" if spelled in ("true", "false") else value


Flag = Annotated[bool, Strict(), BeforeValidator(_read_flag)]
"""A boolean, which may be spelled as a text, "true" or "False": "yes" and 1 are mistakes."""

_HALF_SURROGATE = re.compile("[\ud800-\udfff]")
_HALF_PAIR = "A text of the request contains half of a surrogate pair, which is not a character."


def check_text(text: str) -> str:
    """Refuses a text with half a surrogate pair: JSON can spell one, but it is no character."""
    if not text.isascii() and _HALF_SURROGATE.search(text):
        raise BadRequest(_HALF_PAIR)
    return text


def check_repeated(*values: object) -> None:
    """Refuses values with such a text, which an answer could not repeat."""
    try:
        msgspec.json.encode(values)
    except UnicodeEncodeError:
        raise BadRequest(_HALF_PAIR) from None


Text = Annotated[str, AfterValidator(check_text)]

FIRST_ERROR = Field(fail_fast=True)
"""Marks a list whose first wrong entry is the only one reported: a million entries have a million errors."""
Texts = Annotated[list[Text], FIRST_ERROR]
Ids = Annotated[list[int], FIRST_ERROR]


def is_ids(value: object) -> bool:
    # type() and not isinstance(), because true is not a token
    return isinstance(value, list) and set(map(type, value)) <= {int}


def read_sources(
    value: object, field: LiteralString, most: int, entries: str, shapes: LiteralString
) -> list[str | list[int]]:
    """Texts, or lists of token ids, one alone or up to so many. `shapes` is the error for what is neither."""
    several = isinstance(value, list) and not (value and is_ids(value))
    sources = cast("list[Any]", value if several else [value])
    if len(sources) > most:
        raise too_many(field, most, entries, len(sources))
    if {*map(type, sources)} != {str} and not all(map(is_ids, sources)):
        raise PydanticCustomError(f"{field}_type", shapes)
    return sources


def optional(description: str) -> Any:
    """A field that may be left out, which is the same as null."""
    return Field(default=None, description=description)


Neutral = tuple[object, ...]
"""Values of an unsupported field that ask for nothing. null always does."""

UNSUPPORTED: Mapping[str, Neutral] = {
    "suffix": ("",),
    "prompt_embeds": (),
    "logprob_token_ids": (),
    "lora": (),
    "lora_request": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "watermarking": (False,),
    "routed_experts_prompt_start": (0,),
    "mm_payload": ("tensors", "none"),  # says what only answers of /render carry
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "return_mm_kwargs": (False,),
}
"""Unsupported fields of vLLM, on every endpoint that generates."""

MEANINGLESS = frozenset(
    {
        "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_retention",
        "prompt_cache_options", "prompt_cache_key", "session_id", "keep_alive",
    }
)  # fmt: skip
"""Fields for OpenAI's book-keeping: labels and billing that cannot change an answer here."""

REASONS: Mapping[str, str] = {
    "functions": "has been replaced by `tools`",
    "function_call": "has been replaced by `tool_choice`",
    "moderation": "asks for a check that this server does not have",
    "audio": "asks for sound, and this server has none",
    "thread": "asks for the conversation to be kept, and messages are not kept here: send all of them",
    "web_search_options": "asks for a search, and this server has none",
}
"""What is said of fields that no later version will support either."""

_SHORT = 16
"""The entries that every list and object may have: the least bound of any."""
_LONG_KINDS = (list, dict)


Bounds = Mapping[str, tuple[int, str]]
"""Field -> the most entries that it may have, and the word for them."""


class ForeignField(NamedTuple):
    """A field of other servers."""

    read: Callable[[Any, FieldNotes], dict[str, Any] | None]
    """Returns what it says in our fields; None if it has no effect. Raises BadRequest."""
    meaning: str
    inside: Mapping[str, str] | None = None
    """If it is an object of fields, the names of some of ours in it. Ours at its side go before them."""


def no_effect(neutral: object, meaning: str = "Accepted without effect.") -> ForeignField:
    """A field that is accepted in vain. With the value `neutral` it asks for nothing."""
    return ForeignField(lambda value, notes: {} if value == neutral else None, meaning)


class Body(BaseModel):
    """A request's JSON object. Subclasses name the fields that they refuse or accept without effect."""

    model_config = ConfigDict(extra="ignore")

    unsupported: ClassVar[Mapping[str, Neutral]] = {}
    meaningless: ClassVar[frozenset[str]] = frozenset()
    bounds: ClassVar[Bounds] = {}
    stand_ins: ClassVar[Mapping[str, object]] = {}
    """The fields that may be long, and short values that stand in their place once they have been read."""
    of_dialects: ClassVar[Dialects] = {}
    """Fields of other APIs, and the path and the dialect in which they are taken."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """Names that other servers have for fields of ours, and our names."""
    foreign: ClassVar[Mapping[str, ForeignField]] = {}
    """Fields of other servers that say something in another way than ours."""
    client_names: ClassVar[Mapping[str, str]] = {}
    """Fields of chat completions that errors name, and what this body has in their place."""

    @model_validator(mode="before")
    @classmethod
    def check_fields(cls, body: object, info: ValidationInfo) -> object:
        if isinstance(body, dict):
            others: list[str] = []
            for name, value in body.items():
                if name not in cls.__pydantic_fields__:
                    if not cls._may_pass(name, value):
                        others.append(name)
                elif type(value) in _LONG_KINDS and len(value) > _SHORT:
                    cls._check_length(name, len(value))
            if others:
                return cls._with_ours(body, others, info.context)
        return body

    @classmethod
    def known_names(cls) -> set[str]:
        """The names of fields that are no mistakes."""
        return {*cls.__pydantic_fields__, *cls.other_names, *cls.foreign, *cls.meaningless}

    @classmethod
    def _with_ours(cls, body: dict[str, Any], others: list[str], notes: FieldNotes | None) -> object:
        """The body with our fields in the place of those of other servers."""
        taken = [*cls.other_names, *cls.foreign]
        if unknown := [name for name in others if name not in taken]:
            find_unknown(unknown, [*cls.__pydantic_fields__, *taken], cls.of_dialects, notes)
        body, notes = {**body}, notes or FieldNotes(strict=True)
        for name in [name for name in taken if body.get(name) is not None]:
            value, renamed, field = body[name], cls.other_names.get(name, ""), cls.foreign.get(name)
            if renamed and body.get(renamed) not in (None, value):
                raise BadRequest(f"`{name}` and `{renamed}` say different things. Give one of them.", name)
            found = {renamed: value} if field is None else field.read(value, notes)
            if found is None:
                notes.tell_no_effect(name)
                continue
            if field is None or field.inside is None:
                notes.names |= dict.fromkeys(found, name)
            else:
                found = {ours: each for ours, each in found.items() if body.get(ours) is None}
                notes.names |= {ours: f"{name}.{field.inside.get(ours, ours)}" for ours in found}
            body |= found
            for ours, value in found.items():
                if type(value) in _LONG_KINDS:
                    cls._check_length(ours, len(value))
        return body

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Describes the fields of other servers behind ours, which they may stand for."""
        found = handler.resolve_ref_schema(handler(schema))
        meanings = {name: f"{ours}, by another name." for name, ours in cls.other_names.items()}
        meanings |= {name: each.meaning for name, each in cls.foreign.items()}
        more = {name: {"description": meanings[name], "default": None} for name in sorted(meanings)}
        found["properties"] = {**found.get("properties", {}), **more}
        if renamed := {*cls.other_names.values()} & {*found.get("required", ())}:
            found["required"] = [name for name in found["required"] if name not in renamed]
        return found

    def without_texts(self) -> dict[str, object]:
        """The fields that were given, as JSON has them, with stand-ins for those that may be long."""
        return {**self.model_dump(exclude_unset=True, exclude={*self.stand_ins}), **self.stand_ins}

    @classmethod
    def _check_length(cls, name: str, length: int) -> None:
        most, entries = cls.bounds.get(name, (length, ""))
        if length > most:
            raise too_many(name, most, entries, length)

    @classmethod
    def _may_pass(cls, name: str, value: object) -> bool:
        if name in cls.meaningless:
            return True
        if name not in cls.unsupported:
            return False
        if value is None or value in cls.unsupported[name]:
            return True
        reason = REASONS.get(name, "is not supported yet")
        raise BadRequest(f"`{name}` {reason}. Leave it out of the request.", param=name)


MAX_REPORTED = 5
"""How many validation errors one answer names."""
MAX_INPUT = 100
"""How many characters of a wrong value an answer repeats."""

LONG = 16 << 10
"""What a body may cost to be read in the event loop, in bytes of text: so many take 5 to 25 ms."""
VALUE = 16
"""What a value costs beside its text, in bytes of text: it is checked, and may be an item or a message."""

MOST_VALUES = 20_000

_parse = msgspec.json.Decoder().decode
"""A fast parser. It refuses some texts that the standard library reads, such as NaN and lone surrogates, and
reads all others as the standard library does."""


class InvalidBody(BadRequest):
    type = "Bad Request"

    def __init__(self, message: str, param: str, sentence: str) -> None:
        """`sentence` has the first fault alone."""
        super().__init__(message, param)
        self.sentence = sentence


def is_long(raw: bytes) -> bool:
    """Whether to read this body may take long. It counts what opens a value, in texts too."""
    size = len(raw)
    if size <= LONG // (VALUE + 1):  # it would not be long if every byte opened a value
        return False
    return size > LONG or size + VALUE * (raw.count(b'"') + raw.count(b"[") + raw.count(b"{")) > LONG


def check_values(raw: bytes) -> None:
    """Refuses, before it is parsed, a body with more values than an endpoint without texts has a use for."""
    values = raw.count(b",")
    if values > MOST_VALUES:
        raise BadRequest(f"This endpoint takes at most {MOST_VALUES} values in a request, got {values}.")


def read_json(raw: bytes, validate: Callable[..., Any], notes: FieldNotes | None = None) -> Any:
    """The validated body. `notes` get what is found out about its fields; without, all have to be known."""
    if not raw:
        raise invalid_body([{"type": "missing", "msg": "Field required", "input": None}])
    try:
        content = _parse(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        content = _decode_slowly(raw)
    try:
        return validate(content, from_attributes=True, context=notes)
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False)) from None


def _decode_slowly(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        fault = {"type": "json_invalid", "loc": [error.pos], "msg": "JSON decode error"}
        raise invalid_body([{**fault, "ctx": {"error": error.msg}}]) from None
    except (ValueError, RecursionError):
        raise BadRequest("There was an error parsing the body") from None


def invalid_body(errors: Iterable[Mapping[str, Any]]) -> InvalidBody:
    """The error for a body that does not fit: what is wrong by pydantic's errors, cut to what a reader can
    use."""
    found = list(errors)
    faults = [f"{_location(error)}: {_said(error)}" for error in found[:MAX_REPORTED]]
    more = f"; and {len(found) - MAX_REPORTED} more" if len(found) > MAX_REPORTED else ""
    return InvalidBody("; ".join(faults) + more, _location(found[0]), faults[0])


_WANTED = {
    "bool": "true or false", "dict": "an object", "float": "a number", "int": "a whole number",
    "list": "a list", "model": "an object", "string": "a string",
}  # fmt: skip
"""What has to be given, by the beginning of pydantic's type of an error."""


def _said(error: Mapping[str, Any]) -> str:
    kind, said = error["type"], error["msg"]
    if kind == "json_invalid":
        return f"this is not JSON: {error['ctx']['error']}"
    if not said.startswith("Input "):  # a sentence of ours, or one that tells what was given
        return "this is missing" if kind == "missing" else said.replace(" after validation", "").rstrip(".")
    is_kind = kind.endswith(("_type", "_parsing", "_from_float"))
    wanted = _WANTED.get(kind.partition("_")[0]) if is_kind else None
    said = f"give {wanted}" if wanted else said.removeprefix("Input ")
    return f"{said}, got {_shown(error.get('input'))}"


def _location(error: Mapping[str, Any]) -> str:
    # pydantic names the chosen form of a body (its tag, in parentheses) like a field of it.
    path = [str(part) for part in error.get("loc", ()) if not str(part).startswith("(")]
    return ".".join(["body", *path])


def _shown(value: object) -> str:
    match value:
        case dict():
            return "an object"
        case list() | tuple():
            return f"a list of {len(value)}"
        case str() | bytes() | int() | float() | None:
            text = repr(value) if isinstance(value, str | bytes) else json.dumps(value)
            return text if len(text) <= MAX_INPUT else f"{text[:MAX_INPUT]}…"
        case _:
            return f"a {type(value).__name__}"
