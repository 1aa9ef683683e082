"""What a request says of thinking sets the variables that the template reads, and no others."""

from __future__ import annotations

import pytest

from server.text.style import Style

QWEN, DEEPSEEK, GPT_OSS = {"enable_thinking"}, {"thinking"}, {"reasoning_effort"}


@pytest.mark.parametrize(
    ("style", "read", "variables"),
    [
        (Style(), QWEN, {}),
        (Style(effort="none"), QWEN, {"enable_thinking": False}),
        (Style(effort="low"), QWEN, {"enable_thinking": True}),
        (Style(effort="high"), DEEPSEEK, {"thinking": True}),
        (Style(effort="high"), GPT_OSS, {"reasoning_effort": "high"}),
        (
            Style(effort="high", thinks=False),
            QWEN | GPT_OSS,
            {"enable_thinking": False, "reasoning_effort": "high"},
        ),
        (Style(thinks=True), {"reasoning"}, {"reasoning": True}),
        (Style(verbosity="low"), {"verbosity"}, {"verbosity": "low"}),
        (Style(effort="high", verbosity="low", thinks=True), set(), {}),
    ],
)
def test_variables(style: Style, read: set[str], variables: dict[str, object]) -> None:
    assert style.variables(read) == variables
