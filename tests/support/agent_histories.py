"""Histories as coding agents send them, and damage as models, tools and other servers do it to them.

Claude Code speaks Messages, Codex Responses, and opencode chat completions or Ollama's chat. Damage is done
to what the assistant and its tools have written alone, by rules drawn from a seed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

Body = dict[str, Any]
Place = tuple[list[Any], int]
"""A list of a body, and the index of an entry that a model or a tool has written."""

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
FILES = ("app.py", "docs/läse.md", "src/main.rs", "package.json")
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "file": {"type": "string"}}}
OUTPUTS = ("ok", "", "Traceback (most recent call last):\n  …\nKeyError: 'a'", "<|im_end|> 日本\n" * 20)


def claude_code(random: Random) -> Body:
    """A session of Claude Code, up to what tools have answered or the user says next."""
    text = {"type": "text", "text": "<system-reminder>today</system-reminder>"}
    said: list[Any] = [{"role": "user", "content": [text, {"type": "text", "text": "Mend the test."}]}]
    for turn in range(random.randrange(2, 7)):
        blocks: list[Any] = [{"type": "thinking", "thinking": "I look.", "signature": "EqQB"}]
        blocks += [{"type": "text", "text": "Let me look."}] * random.randrange(2)
        calls = [f"toolu_{turn}{n}" for n in range(random.randrange(1, 4))]
        for id in calls:
            given = {"command": random.choice(("ls", "cat é")), "file_path": random.choice(FILES)}
            blocks.append({"type": "tool_use", "id": id, "name": "Bash", "input": given})
        said.append({"role": "assistant", "content": blocks})
        said.append({"role": "user", "content": [_claude_result(random, id) for id in calls]})
        if random.random() < 0.4:
            said.append({"role": "assistant", "content": "Done." if turn % 2 else [{**text, "text": "So."}]})
            said.append({"role": "user", "content": "Go on."})
    tools = [{"name": name, "description": name, "input_schema": SCHEMA} for name in ("Bash", "Read")]
    return {
        "model": "tiny",
        "max_tokens": 1,
        "system": [{"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}}],
        "messages": said,
        "tools": [*tools, {"type": "web_search_20250305", "name": "web_search"}],
        "metadata": {"user_id": "user_1"},
    }


def _claude_result(random: Random, id: str) -> Body:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    said = random.choice((random.choice(OUTPUTS), [{"type": "text", "text": "seen"}], [image], None))
    return {"type": "tool_result", "tool_use_id": id, "content": said, "is_error": random.random() < 0.2}


def codex(random: Random) -> Body:
    """A session of Codex."""
    items: list[Any] = [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<all>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
    ]
    for turn in range(random.randrange(2, 9)):
        items.append({"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAA"})
        id, kind = f"call_{turn}", random.choice(("function_call", "custom_tool_call"))
        call: Body = {"type": kind, "call_id": id, "name": "shell", "status": "completed"}
        if kind == "function_call":
            call["arguments"] = json.dumps({"command": ["cat", random.choice(FILES)]})
        else:
            call |= {"name": "apply_patch", "input": "*** Begin Patch\n*** End Patch"}
        image = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}
        output = random.choice((random.choice(OUTPUTS), [{"type": "input_text", "text": "a"}, image]))
        items += [call, {"type": f"{kind}_output", "call_id": id, "output": output}]
        if random.random() < 0.4:
            part = {"type": "output_text", "text": "There.", "annotations": []}
            items.append({"type": "message", "role": "assistant", "id": f"msg_{turn}", "content": [part]})
            items.append({"type": "message", "role": "user", "content": "And now?"})
    function = {"type": "function", "name": "shell", "strict": False, "parameters": SCHEMA}
    return {
        "model": "tiny",
        "max_output_tokens": 1,
        "instructions": "You are a coding agent.",
        "input": items,
        "tools": [function, {"type": "custom", "name": "apply_patch"}, {"type": "web_search"}],
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread",
    }


def opencode(random: Random) -> Body:
    """A session of opencode."""
    said: list[Any] = [
        {"role": "system", "content": "You are opencode."},
        {"role": "user", "content": [{"type": "text", "text": "Why does it fail?"}]},
    ]
    for turn in range(random.randrange(2, 8)):
        ids = [f"call_{turn}{n}" for n in range(random.randrange(1, 3))]
        given = json.dumps({"file": random.choice(FILES), "n": turn}, ensure_ascii=False)
        calls = [
            {"id": id, "type": "function", "function": {"name": "read", "arguments": given}} for id in ids
        ]
        text = random.choice((None, "", "I read it.", [{"type": "text", "text": "I read it."}]))
        said.append({"role": "assistant", "content": text, "reasoning_content": "Hm.", "tool_calls": calls})
        for id in ids:
            said.append({"role": "tool", "tool_call_id": id, "content": random.choice(OUTPUTS)})
        if random.random() < 0.4:
            said += [{"role": "assistant", "content": "So."}, {"role": "user", "content": "Mend it."}]
    function = {"name": "read", "description": "Reads.", "parameters": SCHEMA}
    tools = [{"type": "function", "function": function}]
    return {"model": "tiny", "max_tokens": 1, "messages": said, "tools": tools}


def ollama(random: Random) -> Body:
    """The same session in Ollama's form, where calls have no ids and arguments are objects."""
    body = opencode(random)
    for message in body["messages"]:
        content = message["content"] or ""
        message["content"] = content if isinstance(content, str) else content[0]["text"]
        message["thinking"] = message.pop("reasoning_content", "")
        if message.pop("tool_call_id", None):
            message |= {"tool_name": "read", "images": []}
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            del call["id"], call["type"]
    options = {"num_predict": body.pop("max_tokens")}
    return {**body, "options": options, "stream": False}


AGENTS: dict[str, Callable[[Random], Body]] = {
    "/v1/messages": claude_code,
    "/v1/responses": codex,
    "/v1/chat/completions": opencode,
    "/api/chat": ollama,
}
"""By the path that it asks, what makes a session of an agent."""

JUNK: tuple[Any, ...] = (
    None,
    "",
    "x",
    7,
    True,
    [],
    {},
    [None],
    ["a"],
    {"type": "smell"},
    "{",
    '{"a": "\ud83d',
)
BROKEN = ('{"a": "b', '{"a": 1}{"b": 2}', "[1]", "null", "not JSON", '{"a": "\\ud83d"}', '"{\\"a\\": 1}"')
FOREIGN: dict[str, tuple[Body, ...]] = {
    "/v1/messages": (
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        {"type": "redacted_thinking", "data": "EmwKAhgB"},
        {"type": "mcp_tool_use", "id": "m", "name": "f", "server_name": "s", "input": {}},
        {"type": "text", "text": ""},
    ),
    "/v1/responses": (
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "computer_call", "call_id": "cc", "action": {"type": "click"}},
        {"type": "mcp_call", "id": "mcp_1", "name": "f", "arguments": "{}", "output": "x"},
        {"type": "mcp_list_tools", "server_label": "s", "tools": []},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text"}],
            "encrypted_content": "gA=",
        },
        {"type": "message", "role": "assistant", "content": []},
        {"type": "function_call_output", "call_id": "nobody", "output": "late"},
    ),
    "/v1/chat/completions": (
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": []},
        {"role": "tool", "tool_call_id": "nobody", "content": "late"},
        {"role": "tool", "content": [{"type": "resource", "resource": {"uri": "file:///a", "text": "a"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "audio"}]},
    ),
}


FOREIGN["/api/chat"] = FOREIGN["/v1/chat/completions"]


def damaged(path: str, body: Body, random: Random) -> Body:
    """Returns a copy of an agent's body with one to four things wrong in what models and tools wrote."""
    body = copy.deepcopy(body)
    for _ in range(random.randrange(1, 5)):
        random.choice(_DAMAGES)(path, body, random)
    return body


def _written(path: str, body: Body) -> list[Place]:
    if path == "/v1/responses":
        items = body["input"]
        return [(items, n) for n, item in enumerate(items) if item.get("role") in (None, "assistant")]
    found: list[Place] = []
    for number, message in enumerate(body["messages"]):
        role, content = message["role"], message.get("content")
        if role in ("assistant", "tool") and path != "/v1/messages":
            found.append((body["messages"], number))
        for inside in (content, message.get("tool_calls")):
            if isinstance(inside, list):
                found += [(inside, n) for n, each in enumerate(inside) if _is_written(role, each)]
    return found


def _is_written(role: str, part: Any) -> bool:
    return role in ("assistant", "tool") or (isinstance(part, dict) and "tool_use_id" in part)


def _spoil(path: str, body: Body, random: Random) -> None:
    """A field is gone, or is something else."""
    if not (places := _written(path, body)):
        return
    list_, index = random.choice(places)
    node = list_[index]
    while isinstance(node, dict):
        names = [name for name in node if name not in ("role", "tool_use_id")]
        if not names:
            return
        name = random.choice(names)
        if isinstance(node[name], dict) and random.random() < 0.7:
            node = node[name]
            continue
        if random.random() < 0.3:
            del node[name]
        else:
            node[name] = random.choice(JUNK)
        return


def _break_arguments(path: str, body: Body, random: Random) -> None:
    for list_, index in random.sample(places := _written(path, body), len(places)):
        node = list_[index]
        inside = node.get("function") if isinstance(node, dict) else None
        node = inside if isinstance(inside, dict) else node
        names = [name for name in ("arguments", "input") if isinstance(node, dict) and name in node]
        if names:
            node[names[0]] = random.choice(BROKEN)
            return


def _drop(path: str, body: Body, random: Random) -> None:
    if places := _written(path, body):
        list_, index = random.choice(places)
        del list_[index]


def _double(path: str, body: Body, random: Random) -> None:
    if places := _written(path, body):
        list_, index = random.choice(places)
        list_.insert(random.randrange(len(list_) + 1), copy.deepcopy(list_[index]))


def _move(path: str, body: Body, random: Random) -> None:
    if places := _written(path, body):
        list_, index = random.choice(places)
        list_.insert(random.randrange(len(list_)), list_.pop(index))


def _insert_foreign(path: str, body: Body, random: Random) -> None:
    if places := _written(path, body):
        list_, index = random.choice(places)
        list_.insert(index, copy.deepcopy(random.choice(FOREIGN[path])))


def _insert_system(path: str, body: Body, random: Random) -> None:
    said = body["input" if path == "/v1/responses" else "messages"]
    said.insert(random.randrange(1, len(said) + 1), {"role": "system", "content": "Be brief."})


def _ask_for_foreign_tools(path: str, body: Body, random: Random) -> None:
    tool = {"type": random.choice(("web_search", "computer_use_preview", "mcp", "wish")), "name": "x"}
    body["tools"] = [*body["tools"], tool] if random.random() < 0.7 else [tool]


_DAMAGES = (
    *(_spoil, _spoil, _spoil, _break_arguments, _break_arguments, _drop, _double, _move),
    *(_insert_foreign, _insert_system, _ask_for_foreign_tools),
)
