"""Helper processes: what they read, what ends them, and that the next body is served whatever did."""

# pyright: reportPrivateUsage=false
import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from model_facts import READY, changed

from server.errors import ApiError, Overloaded
from server.model_facts import Facts
from server.reading.body_table import BY_NAME, CHAT, COMPLETION, DETOKENIZE, TOKENIZE
from server.reading.helper import LARGE, Helper
from server.reading.helper_process import HelperLimits
from server.reading.prompts import ReadingOptions
from server.text.tokenizer_files import TokenizerFiles
from worker import child

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


@pytest.fixture
def make(folder: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def start(**limits: Any) -> AsyncIterator[Helper]:
        source = TokenizerFiles(str(folder), str(folder / "cache"))
        patient = {"seconds": 60.0, "template_seconds": 60.0}
        helper = Helper(lambda: source, TRUSTED, HelperLimits(**{**patient, **limits}))
        try:
            yield helper
        finally:
            await helper.close()

    return start


async def tokenized(helper: Helper, text: str = "the fox") -> dict[str, Any]:
    found = await helper.read(TOKENIZE, msgspec.json.encode({"prompt": text}), FACTS)
    return msgspec.json.decode(found.result)


def pid_of(helper: Helper) -> int:
    pid = helper._small._process.pid
    assert pid is not None
    return pid


def talk(template: str) -> bytes:
    return msgspec.json.encode({"messages": [{"role": "user", "content": "a"}], "chat_template": template})


async def refusal(helper: Helper, raw: bytes = b'{"prompt": "a"}', name: str = "chat") -> ApiError:
    with pytest.raises(ApiError) as refused:
        await helper.read(BY_NAME[name], raw, FACTS)
    return refused.value


async def test_one_process_reads_body_after_body(make: Callable[..., Any]) -> None:
    async with make() as helper:
        assert helper._small._process.pid is None  # before the first body
        [first, second] = (await helper.read(COMPLETION, b'{"prompt": ["the fox", "a"]}', FACTS)).result
        pid = pid_of(helper)
        assert (await tokenized(helper))["tokens"] == first.tokens
        assert second.length == len(second.tokens) == 1
        raw = msgspec.json.encode({"tokens": first.tokens})
        text = (await helper.read(DETOKENIZE, raw, FACTS)).result
        assert text == b'{"prompt":"the fox"}'
        error = await refusal(helper, b'{"messages": []}')
        assert (error.status, error.param, type(error.message)) == (400, "body.messages", str)
        assert pid_of(helper) == pid


async def test_conversations_are_written_by_the_template_of_their_adapter(make: Callable[..., Any]) -> None:
    raw = msgspec.json.encode({"messages": [{"role": "user", "content": "the fox"}]})
    by = [
        changed(FACTS, chat_template=f"{{{{ messages[0].content | {case} }}}}") for case in ("upper", "title")
    ]
    async with make() as helper:
        ends = [(await helper.read(CHAT, raw, facts)).result.end for facts in (*by, by[0])]
        assert ends == ["THE FOX", "The Fox", "THE FOX"]
        assert "no default chat template" in (await refusal(helper, raw)).message


async def test_it_can_start_before_the_first_body(make: Callable[..., Any]) -> None:
    async with make() as helper:
        helper.start()
        await helper._early
        pid = pid_of(helper)
        await tokenized(helper)
        assert pid_of(helper) == pid


async def test_what_comes_back_has_stand_ins_for_texts(make: Callable[..., Any]) -> None:
    async with make() as helper:
        raw = b'{"prompt": "the fox", "temperature": NaN, "request_id": "\\ud800", "user": "x"}'
        found = await helper.read(COMPLETION, raw, FACTS)
    body = COMPLETION.body.model_validate(json.loads(found.body))
    assert (body.prompt, body.request_id) == (["-"], "\ud800")
    assert body.temperature != body.temperature
    assert body.model_fields_set == {"prompt", "prompt_embeds", "temperature", "request_id"}


@pytest.mark.slow
async def test_a_process_that_takes_too_long_is_replaced(make: Callable[..., Any]) -> None:
    async with make() as helper:
        await tokenized(helper)
        pid = pid_of(helper)
        usual, helper._small._limits = helper._small._limits, HelperLimits(seconds=0.3)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ApiError, match="took more than 0 seconds") as refused:
            await tokenized(helper)
        assert refused.value.status == 400
        helper._small._limits = usual
        await tokenized(helper)
        assert pid_of(helper) != pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
async def test_a_template_that_never_ends_is_ended(make: Callable[..., Any]) -> None:
    async with make(template_seconds=2.0) as helper:
        error = await refusal(helper, talk(RUNAWAY))
        assert (error.status, error.param) == (400, "chat_template")
        assert error.message.startswith("The chat template ran for more than 2 seconds")
        found = await helper.read(CHAT, talk("{{ messages[0].content }}"), FACTS)
        assert found.result.prompt.text == "a"


async def test_a_template_gets_only_so_much_memory(make: Callable[..., Any]) -> None:
    async with make() as helper:
        error = await refusal(helper, talk(HOARDER))
        assert (error.status, error.param) == (400, "chat_template")
        assert error.message.startswith("The chat template took more memory")
        pid = pid_of(helper)
        # What is beyond a template's bound is not beyond that of a body.
        await tokenized(helper, "the fox " * 40_000)
        assert pid_of(helper) == pid


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
async def test_greedy_templates_end_one_way_or_the_other(make: Callable[..., Any], template: str) -> None:
    async with make(template_seconds=0.3, template_memory=64 << 20) as helper:
        error = await refusal(helper, talk(template))
        assert (error.status, error.param) == (400, "chat_template")
        await tokenized(helper)


@pytest.mark.slow
async def test_a_body_gets_only_so_much_memory(make: Callable[..., Any]) -> None:
    async with make(memory=32 << 20) as helper:
        values = b"[" + b",".join([b"[[]]"] * (LARGE // 2)) + b"]"
        error = await refusal(
            helper, b'{"messages": [{"role": "user"}], "documents": [{"a":' + values + b"}]}"
        )
        assert error.status == 400
        assert error.message.startswith("Reading this request took more memory")
        await tokenized(helper)


async def test_a_process_that_dies_is_replaced(make: Callable[..., Any]) -> None:
    async with make() as helper:
        await tokenized(helper)
        os.kill(pid_of(helper), signal.SIGKILL)
        while helper._small._process.pid is not None:
            await asyncio.sleep(0.01)
        await tokenized(helper)  # nobody notices that one has died that had nothing to do
        os.kill(pid_of(helper), signal.SIGSTOP)
        reading = asyncio.create_task(tokenized(helper))
        await asyncio.sleep(0.05)
        os.kill(pid_of(helper), signal.SIGKILL)
        with pytest.raises(ApiError, match="Send this one again") as refused:
            await reading
        assert refused.value.status == 503
        await tokenized(helper)


async def test_a_process_that_keeps_memory_ends_by_itself(make: Callable[..., Any]) -> None:
    async with make(kept_memory=-(1 << 40)) as helper:
        await tokenized(helper)
        first = pid_of(helper)
        await tokenized(helper)
        assert pid_of(helper) != first


async def test_bodies_wait_within_bounds(make: Callable[..., Any]) -> None:
    async with make(waiting_bytes=1000) as helper:
        await tokenized(helper)
        os.kill(pid_of(helper), signal.SIGSTOP)
        first = asyncio.create_task(tokenized(helper, "a" * 5000))  # alone, one may be as long as it is
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await tokenized(helper)
        os.kill(pid_of(helper), signal.SIGCONT)
        await first
        await tokenized(helper)


async def test_nobody_reads_for_a_client_that_has_left(make: Callable[..., Any]) -> None:
    async with make() as helper:
        await tokenized(helper)
        pid = pid_of(helper)
        os.kill(pid, signal.SIGSTOP)
        first, second = (asyncio.create_task(tokenized(helper)) for _ in range(2))
        third = asyncio.create_task(helper.read(CHAT, talk(RUNAWAY), FACTS))
        await asyncio.sleep(0.05)
        for task in (first, third):
            task.cancel()
        os.kill(pid, signal.SIGCONT)
        assert (await second)["count"]
        await tokenized(helper)
        assert pid_of(helper) == pid  # the template that would have ended it did not run


@pytest.mark.slow
async def test_long_bodies_wait_for_each_other_only(make: Callable[..., Any]) -> None:
    async with make() as helper:
        await tokenized(helper, "the fox " * (LARGE // 8 + 1))
        pid = helper._large._process.pid or 0
        os.kill(pid, signal.SIGSTOP)
        long = asyncio.create_task(tokenized(helper, "the fox " * (LARGE // 8 + 1)))
        await asyncio.sleep(0.05)
        await tokenized(helper)
        os.kill(pid, signal.SIGCONT)
        await long


async def test_a_process_that_cannot_start(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = TokenizerFiles(str(folder / "none"), str(folder))
    helper = Helper(lambda: source, TRUSTED)
    assert (await refusal(helper, name="tokenize")).status == 503
    await helper.close()
    assert "did not start" in caplog.text


async def test_no_process_can_be_made(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("no more processes")

    async with make() as helper:
        with monkeypatch.context() as broke:
            broke.setattr(child, "start", broken)
            assert (await refusal(helper, name="tokenize")).status == 503
        await tokenized(helper)


def test_a_helper_imports_no_server_and_no_torch() -> None:
    """It shall be small, and there soon."""
    code = (
        "import sys, server.reading.helper_process as _; "
        "print({'torch', 'transformers', 'fastapi', 'starlette', 'uvicorn', 'zmq'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
