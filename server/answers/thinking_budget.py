"""Where an answer thinks, and how long it may: what the engine is told of a budget of reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.protocol import Thinking
from server.answers.finding import AnswerFormat
from server.text.tokenizer import Tokenizer

NO_REASONING = "thinking_token_budget: it is not known how this model marks its reasoning"


def thinking_within(
    tokenizer: Tokenizer, format: AnswerFormat, budget: int | None, *, is_open: bool, calls: bool = False
) -> Thinking:
    """`is_open`: the prompt has opened the reasoning. A call ends it too, if there are `calls`."""
    thinking = format.thinking

    def tokens(literals: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        texts = [format.as_written(literal) for literal in literals]
        return tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)

    return Thinking(
        budget=budget,
        marker=tokens(thinking.closes[:1])[0] if thinking else (),
        open=is_open,
        opens=tokens(thinking.opens) if thinking else (),
        ends=tokens([format.opener]) if calls and format.opener else (),
    )


def leaves_thinking_open(format: AnswerFormat, prompt: str) -> bool:
    """Whether the last marker of reasoning in a prompt, which may be any text, is one that opens it."""
    closes = format.thinking.closes if format.thinking else ()
    closed = max((prompt.rfind(format.as_written(literal)) for literal in closes), default=-1)
    return max((prompt.rfind(literal.rstrip()) for literal in format.opens), default=-1) > closed
