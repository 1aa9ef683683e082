"""How grammars are given to llguidance, and the bounds of its own work."""

from __future__ import annotations

from typing import Literal

from llguidance import LLMatcher, LLParserLimits

LIMITS = LLParserLimits(max_items_in_row=8192, max_lexer_states=50_000, verbose_errors=False)
"""Its errors do not repeat grammars and texts, which may be secret."""


def as_llguidance(kind: Literal["json", "regex", "lark", "llguidance"], text: str) -> str:
    """The grammar of `Grammar.kind` and `Grammar.text` in llguidance's own form."""
    match kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(text)
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "lark":
            return LLMatcher.grammar_from_lark(text)
        case "llguidance":
            return text
