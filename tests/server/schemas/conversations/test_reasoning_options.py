"""What is said of reasoning, in the words of each API."""

from typing import Any

import pytest

from server.errors import BadRequest
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from server.text.chat_template import AnswerStyle


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})


@pytest.mark.parametrize(
    ("fields", "style"),
    [
        ({"reasoning": {"effort": "high"}}, AnswerStyle(effort="high")),
        ({"reasoning": {"max_tokens": 7}}, AnswerStyle(budget=7)),
        ({"reasoning": {"enabled": False}}, AnswerStyle(thinks=False)),
        (
            {"reasoning": {"effort": "low", "enabled": True}, "reasoning_effort": "low"},
            AnswerStyle("low", None, True),
        ),
        ({"reasoning_budget": 0}, AnswerStyle(budget=0)),
        ({"reasoning_budget": -1}, None),
        ({"reasoning": {}}, None),
        ({"thinking_token_budget": 5}, AnswerStyle(budget=5)),
    ],
)
def test_each_name_has_its_meaning(fields: dict[str, Any], style: AnswerStyle | None) -> None:
    body = chat(**fields)
    assert body.style == style and body.thinking_budget == (style.budget if style else None)
    assert body.include_reasoning
    assert ChatRequest.model_validate(body.without_texts()).style == style


def test_reasoning_may_be_left_out_of_the_answer() -> None:
    assert not chat(reasoning={"exclude": True}).include_reasoning
    assert not chat(include_reasoning=False).include_reasoning
    assert not chat(include_reasoning=False, reasoning={"exclude": False}).include_reasoning


@pytest.mark.parametrize("name", ["thinking_token_budget", "reasoning_budget"])
def test_a_prompt_of_text_has_a_budget_too(name: str) -> None:
    assert CompletionRequest.model_validate({"prompt": "hi", name: 3}).thinking_budget == 3
    assert CompletionRequest.model_validate({"prompt": "hi", name: -1}).thinking_budget is None
    with pytest.raises(BadRequest, match="different things"):
        CompletionRequest.model_validate(
            {"prompt": "hi", name: 3, "thinking_token_budget": 4, "reasoning_budget": 5}
        )
