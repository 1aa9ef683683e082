"""Why a prompt was not cached, asked of a real server."""

from typing import Any

from live import LiveServer, chunks

RULES = "Answer in one short sentence, and name the page of the manual on which you have found it. " * 4


def ask(demo: LiveServer, *talk: str, salt: str = "mine", **body: Any) -> Any:
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, talk, strict=False)]
    body = {"messages": messages, "max_tokens": 2, "temperature": 0, "cache_salt": salt, **body}
    answer = demo.post("/v1/chat/completions", {**body, "include": ["cache_diagnosis"]})
    assert answer.status_code == 200, answer.text
    return chunks(answer)[-1] if body.get("stream") else answer.json()


def test_a_conversation_learns_why_it_was_not_cached(demo: LiveServer) -> None:
    first = ask(demo, RULES, "How do I start it?")["cache_diagnosis"]
    assert (first["reason"], first["cached_tokens"], first["message"]) == ("first_time", 0, None)

    again = ask(demo, RULES, "How do I start it?")["cache_diagnosis"]
    assert again["reason"] in ("rest_of_block", "last_token")
    assert again["matched_tokens"] == again["prompt_tokens"] > again["cached_tokens"] > 0

    dated = ask(demo, RULES.replace("manual", "handbook", 1), "How do I start it?")["cache_diagnosis"]
    assert (dated["reason"], dated["message"], dated["role"]) == ("different_token", 0, "system")
    assert "handbook" in dated["text_around"]
    assert "manual" not in dated["text_around"].partition("handbook")[0]

    turn = ask(demo, RULES, "How do I stop it, " + "please, " * 20, stream=True)["cache_diagnosis"]
    assert (turn["reason"], turn["message"], turn["role"]) == ("different_token", 1, "user")

    assert ask(demo, RULES, "How do I start it?", salt="other")["cache_diagnosis"]["reason"] == "first_time"
