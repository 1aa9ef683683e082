"""What a request says of thinking sets the variables that the template reads, and no others."""

from __future__ import annotations

import pytest

from server.text.chat_template import AnswerStyle

QWEN, DEEPSEEK, GPT_OSS = {"enable_thinking"}, {"thinking"}, {"reasoning_effort"}


@pytest.mark.parametrize(
    ("style", "read", "variables"),
    [
        (AnswerStyle(), QWEN, {}),
        (AnswerStyle(effort="none"), QWEN, {"enable_thinking": False}),
        (AnswerStyle(effort="low"), QWEN, {"enable_thinking": True}),
        (AnswerStyle(effort="high"), DEEPSEEK, {"thinking": True}),
        (AnswerStyle(effort="high"), GPT_OSS, {"reasoning_effort": "high"}),
        (
            AnswerStyle(effort="high", thinks=False),
            QWEN | GPT_OSS,
            {"enable_thinking": False, "reasoning_effort": "high"},
        ),
        (AnswerStyle(thinks=True), {"reasoning"}, {"reasoning": True}),
        (AnswerStyle(verbosity="low"), {"verbosity"}, {"verbosity": "low"}),
        (AnswerStyle(effort="high", verbosity="low", thinks=True), set(), {}),
    ],
)
def test_variables(style: AnswerStyle, read: set[str], variables: dict[str, object]) -> None:
    assert style.variables(read) == variables
