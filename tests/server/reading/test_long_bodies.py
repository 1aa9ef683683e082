"""Long bodies in helper processes: what is read, what ends it, and that the next one is read after it."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from model_facts import READY, changed

from server.errors import ApiError
from server.helpers.job_queue import Helpers
from server.model_facts import Facts
from server.reading.body_table import BY_NAME, CHAT, COMPLETION, DETOKENIZE, TOKENIZE, Reading
from server.reading.long_bodies import BODIES, LARGE, LongBodies
from server.reading.reading_context import ReadingOptions
from server.text.template_sandbox import TemplateLimits
from server.text.tokenizer_files import TokenizerFiles

pytestmark = pytest.mark.slow(3)

FACTS = Facts(
    model_names=("m",),
    root="m",
    created=0,
    ready=changed(READY, vocab_size=450),
    max_model_len=100_000,
    eos_token_ids=(7,),
)
TRUSTED = ReadingOptions(trust_request_chat_template=True)
RUNAWAY = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
HOARDER = (
    "{% set ns = namespace(s='aaaaaaaaaaaaaaaa') %}"
    "{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
)


Make = Callable[..., Any]


@pytest.fixture
def make(folder: Path) -> Make:
    @asynccontextmanager
    async def start(template_seconds: float = 60.0, template_memory: int = 256 << 20, **limits: Any):
        source, helpers = TokenizerFiles(str(folder), str(folder / "cache")), Helpers()
        job = replace(BODIES, **{"seconds": 60.0, **limits})
        try:
            yield LongBodies(
                helpers, lambda: source, TRUSTED, job, TemplateLimits(template_seconds, template_memory)
            )
        finally:
            helpers.close()

    return start


async def tokenized(bodies: LongBodies, text: str = "the fox") -> dict[str, Any]:
    found = await bodies.read(TOKENIZE, msgspec.json.encode({"prompt": text}), FACTS)
    return msgspec.json.decode(found.result)


def pid_of(bodies: LongBodies) -> int:
    pid = bodies.small.processes[0].pid
    assert pid is not None
    return pid


def talk(template: str) -> bytes:
    return msgspec.json.encode({"messages": [{"role": "user", "content": "a"}], "chat_template": template})


async def refusal(bodies: LongBodies, raw: bytes = b'{"prompt": "a"}', name: str = "chat") -> ApiError:
    with pytest.raises(ApiError) as refused:
        reading: Reading[Any] = BY_NAME[name]
        await bodies.read(reading, raw, FACTS)
    return refused.value


async def test_one_process_reads_body_after_body(make: Make) -> None:
    async with make() as bodies:
        assert bodies.small.processes[0].pid is None  # before the first body
        [first, second] = (await bodies.read(COMPLETION, b'{"prompt": ["the fox", "a"]}', FACTS)).result
        pid = pid_of(bodies)
        assert (await tokenized(bodies))["tokens"] == first.tokens
        assert second.length == len(second.tokens) == 1
        raw = msgspec.json.encode({"tokens": first.tokens})
        text = (await bodies.read(DETOKENIZE, raw, FACTS)).result
        assert text == b'{"prompt":"the fox"}'
        error = await refusal(bodies, b'{"messages": []}')
        assert (error.status, error.param, type(error.message)) == (400, "body.messages", str)
        assert pid_of(bodies) == pid


async def test_conversations_are_written_by_the_template_of_their_adapter(make: Make) -> None:
    raw = msgspec.json.encode({"messages": [{"role": "user", "content": "the fox"}]})
    by = [
        changed(FACTS, chat_template=f"{{{{ messages[0].content | {case} }}}}") for case in ("upper", "title")
    ]
    async with make() as bodies:
        ends = [(await bodies.read(CHAT, raw, facts)).result.end for facts in (*by, by[0])]
        assert ends == ["THE FOX", "The Fox", "THE FOX"]
        assert "no default chat template" in (await refusal(bodies, raw)).message


async def test_what_comes_back_has_stand_ins_for_texts(make: Make) -> None:
    async with make() as bodies:
        raw = b'{"prompt": "the fox", "temperature": NaN, "request_id": "\\ud800", "user": "x"}'
        found = await bodies.read(COMPLETION, raw, FACTS)
    body = COMPLETION.body.model_validate(json.loads(found.body))
    assert (body.prompt, body.request_id) == (["-"], "\ud800")
    assert body.temperature != body.temperature
    assert body.model_fields_set == {"prompt", "prompt_embeds", "suffix", "temperature", "request_id"}


async def test_a_tool_may_have_bounds_of_more_than_64_bits(make: Make) -> None:
    schema = {"type": "object", "properties": {"wei": {"type": "integer", "maximum": (1 << 256) - 1}}}
    tools = [{"type": "function", "function": {"name": "pay", "parameters": schema}}]
    said = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "chat_template": "{{ tools }}"}
    async with make() as bodies:
        found = (await bodies.read(CHAT, msgspec.json.encode(said), FACTS)).result
    assert str((1 << 256) - 1) in found.prompt.text
    assert found.tools["pay"]["properties"]["wei"]["maximum"] == 2.0**256


@pytest.mark.slow
async def test_a_template_that_never_ends_is_ended(make: Make) -> None:
    async with make(template_seconds=2.0) as bodies:
        error = await refusal(bodies, talk(RUNAWAY))
        assert (error.status, error.param) == (400, "chat_template")
        assert error.message.startswith("The chat template ran for more than 2 seconds")
        found = await bodies.read(CHAT, talk("{{ messages[0].content }}"), FACTS)
        assert found.result.prompt.text == "a"


async def test_a_template_gets_only_so_much_memory(make: Make) -> None:
    async with make() as bodies:
        error = await refusal(bodies, talk(HOARDER))
        assert (error.status, error.param) == (400, "chat_template")
        assert error.message.startswith("The chat template took more memory")
        pid = pid_of(bodies)
        # What is beyond a template's bound is not beyond that of a body.
        await tokenized(bodies, "the fox " * 40_000)
        assert pid_of(bodies) == pid


GREEDY = [
    "{% set long = range(100000) | list %}{{ long | select('in', long) | list | length }}",
    "{% set long = range(100000) | list %}{{ ([long] * 2000) | sum(start=[]) | length }}",
    "{% set t = 'a' * 1000000 %}{% set l = [t] * 3000 %}{{ l | string | length }}",
    "{% set t = 'a' * 1000000 %}{% set l = [t] * 3000 %}{{ l | tojson | length }}",
    "{% set t = 'a' * 1000000 %}{{ t.replace('a', t[:1000]) | length }}",
    "{% set t = 'a' * 1000000 %}{{ t.join(t) | length }}",
    "{{ '%2000000000s' % 'a' }}",
    "{{ '{:>2000000000}'.format('a') }}",
]
"""Templates that no bound of the sandbox ends."""


@pytest.mark.turns(4)
@pytest.mark.parametrize("template", GREEDY, ids=range(len(GREEDY)))
async def test_greedy_templates_end_one_way_or_the_other(make: Make, template: str) -> None:
    async with make(template_seconds=0.3, template_memory=64 << 20) as bodies:
        error = await refusal(bodies, talk(template))
        assert (error.status, error.param) == (400, "chat_template")
        await tokenized(bodies)


@pytest.mark.slow
async def test_a_body_gets_only_so_much_memory(make: Make) -> None:
    async with make(memory=32 << 20) as bodies:
        values = b"[" + b",".join([b"[[]]"] * (LARGE // 2)) + b"]"
        error = await refusal(
            bodies, b'{"messages": [{"role": "user"}], "documents": [{"a":' + values + b"}]}"
        )
        assert error.status == 400
        assert error.message.startswith("Reading this request took more memory")
        await tokenized(bodies)


@pytest.mark.slow
async def test_long_bodies_wait_for_each_other_only(make: Make) -> None:
    async with make() as bodies:
        await tokenized(bodies, "the fox " * (LARGE // 8 + 1))
        pid = bodies.large.processes[0].pid or 0
        os.kill(pid, signal.SIGSTOP)
        long = asyncio.create_task(tokenized(bodies, "the fox " * (LARGE // 8 + 1)))
        await asyncio.sleep(0.05)
        await tokenized(bodies)
        os.kill(pid, signal.SIGCONT)
        await long
