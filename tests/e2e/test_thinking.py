"""The demo model thinks and calls tools by itself, so that this is text which a model has really written."""

import json
from typing import Any

import openai
import pytest

SUM: Any = [{"role": "user", "content": "What is 3 plus 4?"}]
THOUGHT, ANSWER = "3 + 4 = 7.", "3 plus 4 is 7."
THINKS: Any = {"enable_thinking": True}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}


def ask(client: openai.OpenAI, messages: Any = SUM, **body: Any) -> Any:
    extra = {name: body.pop(name) for name in ("enable_thinking", "thinking_token_budget") if name in body}
    return client.chat.completions.create(
        model="demo", messages=messages, temperature=0, max_tokens=80, extra_body=extra, **body
    )


def test_reasoning_comes_apart_from_the_answer(client: openai.OpenAI) -> None:
    for asked in (THINKS, {"reasoning_effort": "low"}):
        answer = ask(client, **asked)
        message = answer.choices[0].message
        assert (message.reasoning, message.content) == (THOUGHT, ANSWER)
        assert answer.usage.completion_tokens_details.reasoning_tokens > len(THOUGHT) // 3
    plain = ask(client).choices[0].message
    assert (plain.reasoning, plain.content) == (None, ANSWER)


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    deltas = [chunk.choices[0].delta for chunk in ask(client, stream=True, **THINKS)]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == ANSWER


def test_a_budget_ends_the_reasoning(client: openai.OpenAI) -> None:
    answer = ask(client, thinking_token_budget=3, **THINKS)
    assert answer.usage.completion_tokens_details.reasoning_tokens <= 3
    assert THOUGHT.startswith(answer.choices[0].message.reasoning)
    assert answer.choices[0].message.content


def test_a_budget_of_a_prompt_of_text(client: openai.OpenAI) -> None:
    prompt = "<|im_start|>user\nWhat is 47 plus 38?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    for budget in (0, 4):
        answer = client.completions.create(
            model="demo",
            prompt=prompt,
            temperature=0,
            max_tokens=60,
            extra_body={"thinking_token_budget": budget, "return_token_ids": True},
        ).choices[0]
        ids: Any = answer.model_extra and answer.model_extra["token_ids"]
        assert answer.text.index("</think>") <= 4 * budget and len(ids) > budget


def test_a_form_binds_what_stands_behind_the_reasoning(client: openai.OpenAI) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {
            "name": "sum",
            "schema": {"type": "object", "properties": {"sum": {"type": "integer"}}},
        },
    }
    message = ask(client, response_format=form, **THINKS).choices[0].message
    assert message.reasoning == THOUGHT and isinstance(json.loads(message.content), dict)


@pytest.mark.parametrize("thinks", [{}, THINKS])
def test_a_tool_is_called_and_its_result_is_told(client: openai.OpenAI, thinks: Any) -> None:
    choice = ask(client, [QUESTION], tools=[WEATHER], **thinks).choices[0]
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and bool(choice.message.reasoning) == bool(thinks)
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    said = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "condition": "sunny"}'}
    after = ask(client, [QUESTION, said, result], tools=[WEATHER], **thinks).choices[0].message
    assert after.content == "It is 21 degrees and sunny in Paris."


def test_responses_and_messages_have_it_too(client: openai.OpenAI, claude: Any) -> None:
    effort: Any = {"effort": "low"}
    answer = client.responses.create(model="demo", input=SUM, temperature=0, reasoning=effort)
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output_text == ANSWER
    thinking: Any = {"type": "enabled", "budget_tokens": 60}
    body: Any = {"max_tokens": 80, "thinking": thinking, "extra_body": {"temperature": 0}}
    message = claude.messages.create(model="demo", messages=SUM, **body)
    assert [block.type for block in message.content] == ["thinking", "text"]
    said = [getattr(block, "thinking", "") or getattr(block, "text", "") for block in message.content]
    assert said == [THOUGHT, ANSWER]
