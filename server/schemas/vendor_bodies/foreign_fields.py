"""Fields of other servers at the endpoints that generate, and what they say in our fields."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from server.errors import BadRequest
from server.schemas.body import ForeignField, invalid_body, no_effect
from server.schemas.ollama.options import OllamaOptions, penalty_window
from server.schemas.unknown_fields import FieldNotes

GENERATION_NAMES: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "reasoning_budget": "thinking_token_budget",
    "repeat_penalty": "repetition_penalty",
    "rid": "request_id",
    "sampling_seed": "seed",
    "stop_sequences": "stop",
    "thinking_budget": "thinking_token_budget",
}
"""Names of llama.cpp, SGLang, DashScope and transformers for fields of ours."""

_TOGETHER, _HIDDEN = {"separate_reasoning": False}, {"include_reasoning": False}
_REASONING_FORMATS: Mapping[str, dict[str, Any]] = {
    "auto": {}, "deepseek": {}, "deepseek-legacy": {}, "parsed": {},
    "none": _TOGETHER, "raw": _TOGETHER, "hidden": _HIDDEN,
}  # fmt: skip


def foreign_length(unbounded: int | None) -> ForeignField:
    """llama.cpp's `n_predict`. `unbounded`: the max_tokens of an answer that fills the context."""

    def read(value: Any, notes: FieldNotes) -> dict[str, Any]:
        return {"max_tokens": unbounded if type(value) is int and value < 0 else value}

    return ForeignField(read, "max_tokens, as llama.cpp has it; -1 fills the context.")


def _cache_prompt(value: Any, notes: FieldNotes) -> dict[str, Any]:
    if not isinstance(value, bool):
        raise BadRequest("`cache_prompt` is true or false.", "cache_prompt")
    return {} if value else {"cache_salt": secrets.token_hex(16)}


def _reasoning_format(value: Any, notes: FieldNotes) -> dict[str, Any]:
    found = _REASONING_FORMATS.get(value) if isinstance(value, str) else None
    if found is None:
        kinds = ", ".join(_REASONING_FORMATS)
        raise BadRequest(f"`reasoning_format` is one of {kinds}, got {value!r:.60}.", "reasoning_format")
    return found


def _lora_path(value: Any, notes: FieldNotes) -> dict[str, Any]:
    if not isinstance(value, str):
        raise BadRequest("`lora_path` is the name of one adapter.", "lora_path")
    return {"model": value} if value else {}


def _options(value: Any, notes: FieldNotes) -> dict[str, Any]:
    try:
        options = OllamaOptions.model_validate(value, context=notes)
    except ValidationError as error:
        faults = [{**each, "loc": ("options", *each["loc"])} for each in error.errors(include_url=False)]
        raise invalid_body(faults) from None
    if options.num_ctx is not None:
        notes.tell_no_effect("options.num_ctx")
    return options.as_ours()


ADAPTER_FIELDS: Mapping[str, ForeignField] = {
    "lora_path": ForeignField(_lora_path, "The name of an adapter, in place of `model`; as SGLang has it.")
}

GENERATION_FIELDS: Mapping[str, ForeignField] = {
    "repeat_last_n": penalty_window("repetition_penalty"),
    "cache_prompt": ForeignField(_cache_prompt, "false: the prompt shares no cached prefix."),
    "options": ForeignField(
        _options,
        "Ollama's object, such as `num_predict` and `temperature`. Our fields go before its.",
        OllamaOptions.client_names,
    ),
    **ADAPTER_FIELDS,
    "return_token_offsets": no_effect(
        False, "Without effect where answers are generated, as in vLLM; see /tokenize."
    ),
}

CHAT_FIELDS: Mapping[str, ForeignField] = {
    **GENERATION_FIELDS,
    "n_predict": foreign_length(None),
    "reasoning_format": ForeignField(
        _reasoning_format,
        "llama.cpp's and Groq's: none and raw leave the reasoning in the content, hidden leaves it out.",
    ),
}
