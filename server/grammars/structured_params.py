"""What a client may ask of the form of its answers."""

from __future__ import annotations

from typing import Any

import msgspec

from server.errors import BadRequest

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The fields of which one says what an answer shall be; the others say how."""


class StructuredOutputsParams(
    msgspec.Struct, kw_only=True, repr_omit_defaults=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The form that an answer shall have: exactly one of the first six. Names and meanings are vLLM's."""

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema."""
    regex: str | None = None
    """A regular expression, which the whole answer matches."""
    choice: list[str] | None = None
    """The texts of which the answer is one."""
    grammar: str | None = None
    """A grammar in EBNF as llama.cpp writes it, with `::=`, or in llguidance's form of Lark."""
    json_object: bool | None = None
    """Whether the answer is any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Text of which parts between tags have forms of their own, as xgrammar describes it in JSON."""
    disable_any_whitespace: bool = False
    """Whether JSON is written without whitespace between its tokens."""
    disable_additional_properties: bool | None = None
    """Whether objects have only the properties that their schema names. None: those that name some have."""
    whitespace_pattern: str | None = None
    """A regular expression of the whitespace that may stand between tokens of JSON."""

    def asked(self) -> list[str]:
        """The names of the constraints that are asked for."""
        # `json: false` is a schema, which nothing satisfies; `json_object: false` asks for nothing.
        return [
            name
            for name in CONSTRAINTS
            if (value := getattr(self, name)) is not None and (name != "json_object" or value)
        ]


class AskedForm(msgspec.Struct, frozen=True, tag=True):
    """The form that was asked for, and by which field of the request."""

    params: StructuredOutputsParams
    field: str
    strict: bool = False
    """Whether a request is refused of which not all can be enforced."""

    def constraint(self) -> str:
        """The name of the one constraint. Raises BadRequest if there is none, or more than one."""
        names = self.params.asked()
        if len(names) > 1:
            raise BadRequest(
                "You can only use one kind of structured outputs constraint but multiple are specified: "
                f"{', '.join(names)}.",
                self.field,
            )
        if not names:
            raise BadRequest(
                "You must use one kind of structured outputs constraint but none are specified: give one of "
                f"{', '.join(CONSTRAINTS)}.",
                self.field,
            )
        return names[0]
