"""What the tokenizer's files say, for those who ask and may know."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from server.frontend.frontend import Frontend
from server.options.parse_server_options import parse
from server.requests import checkpoint_facts
from server.run.app import create_app

GetReady = Callable[..., Awaitable[Frontend]]


async def ask(frontend: Frontend) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(frontend), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        return await http.get("/tokenizer_info")


async def test_files_of_the_tokenizer_are_told(ready: GetReady, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    answer = await ask(await ready("--enable-tokenizer-info-endpoint"))
    assert answer.json() == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "chat_template": "{{ messages }}",
    }


async def test_it_is_off_by_default(ready: GetReady) -> None:
    answer = await ask(await ready())
    assert answer.status_code == 403
    assert "--enable-tokenizer-info-endpoint" in answer.json()["error"]["message"]


def test_a_tokenizer_may_have_a_revision_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def resolve(model: str, revision: str | None, *_: object) -> Path:
        asked.append((model, revision))
        return tmp_path

    monkeypatch.setattr(checkpoint_facts, "resolve", resolve)
    for flags in (
        ["--tokenizer", "o/t"],
        ["--tokenizer-revision", "r"],
        ["--tokenizer=o/t", "--tokenizer-revision=r"],
    ):
        checkpoint_facts.tokenizer_folder(parse(["o/m", *flags], {}), Path("elsewhere"))
    assert asked == [("o/t", None), ("o/m", "r"), ("o/t", "r")]
    assert checkpoint_facts.tokenizer_folder(parse(["o/m"], {}), Path("elsewhere")) == Path("elsewhere")
