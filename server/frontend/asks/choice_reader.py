"""Reads what the model writes for one choice of a conversation's answer."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from server.frontend.asks.answer_plan import AnswerPlan
from server.frontend.text_output import Delta
from server.output_parsing.answer_reader import AnswerReader
from server.reading.prompts import Conversation
from server.schemas.chat import ChatRequest
from worker.protocol import TokenLogprobs


class ChoiceReader:
    """What reads one choice of a conversation's answer as parts: reasoning, texts and calls."""

    def __init__(self, conversation: Conversation, chat: ChatRequest, plan: AnswerPlan) -> None:
        self.has_calls = False
        """Whether a call is complete."""
        self.reader: AnswerReader | None = None
        """None if the answer is text and nothing else."""
        format, tools = plan.format, conversation.tools
        self.counts_reasoning = bool(format and format.thinking)
        if format is None:
            return
        if tools and chat.tool_choice is not None:
            choice = chat.choice
            tools = {name: schema for name, schema in tools.items() if choice.allows(name)}
        self.reader = AnswerReader(
            format.dialect,
            format.thinking,
            tools=tools or None,
            is_thinking=format.begins_thinking(conversation.end),
            written=format.written,
            calls_end_thinking=not plan.holds_late_calls,
            holds_calls=False,
        )


class TokenByToken:
    """Cuts the deltas of a choice into tokens, so that how many came in a step makes no difference."""

    def __init__(self) -> None:
        self._unshown: list[tuple[int, TokenLogprobs, int]] = []
        """Tokens, with their logprobs and widths, whose text may become a stop string, or is no whole
        character yet."""

    def pieces(self, delta: Delta) -> Iterator[tuple[Delta, list[int]]]:
        """The pieces, each with its tokens, and the widths that the reader of the choice gets with it."""
        # The token that ends an answer has no width: it is no part of the text.
        self._unshown += zip(delta.token_ids, delta.logprobs, delta.widths, strict=False)
        text, widths, taken = delta.text, delta.widths, 0
        piece = Delta(delta.index, token_ids=[], logprobs=[], widths=[])
        while text and taken < len(self._unshown):
            id, entry, width = self._unshown[taken]
            taken += 1
            piece.token_ids.append(id)
            piece.logprobs.append(entry)
            piece.widths.append(width)
            piece.text, text = text[:width], text[width:]
            if piece.text:
                yield piece, widths
                piece, widths = Delta(delta.index, token_ids=[], logprobs=[], widths=[]), []
        del self._unshown[:taken]
        own = {"token_ids": piece.token_ids, "logprobs": piece.logprobs, "widths": piece.widths}
        yield replace(delta, text=text, **own), widths
