"""The fields that say what form answers shall have: OpenAI's, and those of other servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

import msgspec
from pydantic import AfterValidator, ValidationInfo

from server.errors import BadRequest
from server.grammars.response_format import AskedForm, StructuredOutputsParams
from server.schemas.body import Body, optional
from server.schemas.unknown_fields import find_unknown

_FORMATS = "text, json_object, json_schema and structural_tag"


def _known_alone(value: object, info: ValidationInfo) -> object:
    """What is asked for, without fields that nobody knows."""
    if not isinstance(value, dict):
        return value
    asked, known = cast("dict[str, object]", value), StructuredOutputsParams.__struct_fields__
    if unknown := [name for name in asked if name not in known]:
        find_unknown(unknown, known, {}, info.context)
    return {name: each for name, each in asked.items() if name in known}


Constraints = Annotated[object, AfterValidator(_known_alone)]


class StructuredBody(Body):
    """Every field is one way to say it; a request uses one of them."""

    response_format: object = optional(
        "The form of the answer as OpenAI describes it: `text`, `json_object`, `json_schema`, or "
        "`structural_tag`. What cannot be enforced is refused with `strict: true`; otherwise the header "
        "`Warning` names it."
    )
    structured_outputs: Constraints = optional(
        "The same in vLLM's words: one of json, regex, choice, grammar, json_object and "
        "structural_tag, and how JSON is written."
    )
    structural_tag: object = optional("structured_outputs.structural_tag")
    guided_json: object = optional("structured_outputs.json")
    guided_regex: object = optional("structured_outputs.regex")
    guided_choice: object = optional("structured_outputs.choice")
    guided_grammar: object = optional("structured_outputs.grammar")
    guided_json_object: object = optional("structured_outputs.json_object")
    guided_whitespace_pattern: object = optional("structured_outputs.whitespace_pattern")
    guided_decoding_backend: object = optional("Without effect: there is one engine for all grammars.")
    json_schema: object = optional("structured_outputs.json, as SGLang has it.")
    regex: object = optional("structured_outputs.regex, as SGLang has it.")
    ebnf: object = optional("structured_outputs.grammar, as SGLang has it.")
    grammar: object = optional("structured_outputs.grammar, as llama.cpp has it.")

    def asked_form(self) -> AskedForm | None:
        """What is asked of the form of the answer, if anything is. Raises BadRequest."""
        if self.model_fields_set.isdisjoint(_READERS):
            return None
        found = [
            asked
            for name, read in _READERS.items()
            if name in self.model_fields_set
            and (value := getattr(self, name)) is not None
            and (asked := read(name, value)) is not None
        ]
        if len(found) > 1:
            raise BadRequest(
                "You can only use one kind of structured outputs constraint but multiple are specified: "
                f"{', '.join(asked.field for asked in found)}.",
                found[1].field,
            )
        if not found:
            return None
        [asked] = found
        if self.guided_whitespace_pattern is not None:
            params = msgspec.structs.replace(
                asked.params,
                whitespace_pattern=_text(self.guided_whitespace_pattern, "guided_whitespace_pattern"),
            )
            asked = msgspec.structs.replace(asked, params=params)
        return asked


def _response_format(field: str, value: object) -> AskedForm | None:
    if not isinstance(value, dict):
        raise BadRequest(f"`{field}` is an object with a `type`: {_FORMATS}.", field)
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            schema = value.get("schema")  # as llama.cpp and others have it
            return _asked(field, {"json_object": True} if schema is None else {"json": schema})
        case "json_schema":
            named = value.get("json_schema")
            if not isinstance(named, dict) or named.get("schema") is None:
                raise BadRequest(f"`{field}` of the type json_schema needs `json_schema.schema`.", field)
            strict = named.get("strict")
            if strict not in (None, True, False):
                raise BadRequest("`json_schema.strict` is true or false.", field)
            return _asked(field, {"json": named["schema"]}, strict=bool(strict))
        case "structural_tag":
            return _asked(field, {"structural_tag": value})
        case other:
            raise BadRequest(f"`{field}.type` is one of {_FORMATS}, got {other!r:.60}.", field)


def _structured_outputs(field: str, value: object) -> AskedForm | None:
    asked = _asked(field, value)
    asked.constraint()
    return asked


def _json_object(field: str, value: object) -> AskedForm | None:
    if not isinstance(value, bool):
        raise BadRequest(f"`{field}` is true or false.", field)
    return _asked(field, {"json_object": True}) if value else None


def _constraint(name: str) -> Callable[[str, object], AskedForm | None]:
    return lambda field, value: _asked(field, {name: value})


def _asked(field: str, params: object, *, strict: bool = False) -> AskedForm:
    try:
        return AskedForm(msgspec.convert(params, StructuredOutputsParams), field, strict)
    except msgspec.ValidationError as error:
        raise BadRequest(f"`{field}`: {error}", field) from None


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"`{field}` is a text.", field)
    return value


_READERS: Mapping[str, Callable[[str, Any], AskedForm | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "structural_tag": _constraint("structural_tag"),
    "guided_json": _constraint("json"),
    "guided_regex": _constraint("regex"),
    "guided_choice": _constraint("choice"),
    "guided_grammar": _constraint("grammar"),
    "guided_json_object": _json_object,
    "json_schema": _constraint("json"),
    "regex": _constraint("regex"),
    "ebnf": _constraint("grammar"),
    "grammar": lambda field, value: _asked(field, {"grammar": value}) if value != "" else None,
}
