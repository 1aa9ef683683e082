"""The probe of the suite canitoolcall passes, whole and streamed, with the templates of its nine families.

The engine "generates" what the family's template writes for the answer that a scenario asks for.
"""

import asyncio
import io
import json
from collections.abc import Mapping
from urllib.request import Request

import canitoolcall.probe as suite
import pytest
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend
from family_templates import TEMPLATES, family_tokenizer, written_answer
from model_facts import changed
from probed_families import as_message, check_report, written_for
from recorded_calls import FIXTURES


class Answer(io.BytesIO):
    """An answer, as urllib hands it to the probe."""

    def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
        super().__init__(body)
        self.headers = headers


class Opener:
    """Sends the probe's requests to an app in this process, whose engine writes the answers wanted."""

    def __init__(self, family: str) -> None:
        self._family, self._loop = family, asyncio.get_running_loop()
        tokenizer = family_tokenizer(family)
        self._frontend = FakeFrontend(tokenizer=tokenizer)
        known = {"max_model_len": 4096, "vocab_size": tokenizer.vocab_size}
        self._frontend.facts = changed(self._frontend.facts, **known)
        self._client = make_client(make_app(self._frontend))

    def open(self, request: Request, timeout: float) -> Answer:
        assert isinstance(request.data, bytes)
        return asyncio.run_coroutine_threadsafe(self._answer(request.data), self._loop).result(timeout)

    async def _answer(self, raw: bytes) -> Answer:
        messages = json.loads(raw)["messages"]
        scenario = next(each for each in suite.BUILTIN_SCENARIOS if [*each.messages] == messages)
        text = written_for(scenario, self._family)
        self._frontend.reply_ids = self._frontend.tokenizer.encode(text, add_special_tokens=False)
        headers = {"Content-Type": "application/json"}
        response = await self._client.post("/v1/chat/completions", content=raw, headers=headers)
        assert response.status_code == 200, response.text
        return Answer(response.content, response.headers)


@pytest.mark.parametrize("family", TEMPLATES)
async def test_the_probe_passes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "_OPENER", Opener(family))
    report = await asyncio.to_thread(suite.probe, "http://localhost/v1", "tiny", concurrency=1)
    check_report(report, family)


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_templates_write_what_the_families_own_have_written(family: str) -> None:
    template = TEMPLATES[family]
    compared = 0
    for fixture in FIXTURES:
        said = fixture.expected
        if (
            said is None
            or fixture.reference_model != template.model
            or fixture.provenance.kind != "template_render"
            or not fixture.id.startswith(template.renders)
            or fixture.truncated
            or (fixture.thinking is False and template.opens)  # the prompt has closed the reasoning
            or "multi-turn" in fixture.id
        ):
            continue
        calls = ((call.name, call.arguments) for call in said.tool_calls)
        message = as_message(said.content, said.reasoning_content, calls)
        assert written_answer(family, [{"role": "user", "content": "?"}], message) == fixture.raw_output
        compared += 1
    assert compared >= 3
