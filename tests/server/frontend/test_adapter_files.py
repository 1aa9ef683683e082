"""What the files of an adapter say: its chat template, and that its tokenizer is the model's."""

import json
from pathlib import Path
from typing import Any

import pytest
from adapter_files import write_adapter
from fake_frontend import FakeFrontend
from model_facts import changed

from engine_core.adapters.messages import AdapterState
from models.config import ConfigError
from server.frontend.adapter_files import facts_with, read_named
from server.options.parse_server_options import parse
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TokenizerFiles

TEMPLATE = "{% for message in messages %}{{ message.content | upper }}{% endfor %}"


@pytest.fixture
def base(folder: Path) -> Tokenizer:
    (folder / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    return TokenizerFiles(str(folder), str(folder)).load()


def read(adapter: Path, base: Tokenizer, *flags: str) -> Any:
    return read_named("sql", str(adapter), parse(["m", *flags], {}), base)


def test_a_template_beside_an_adapter_is_its_own_but_for_that_of_the_operator(
    base: Tokenizer, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "sql")
    assert read(adapter, base).chat_template == ""
    (adapter / "chat_template.jinja").write_text(base.chat.sources[0])
    assert read(adapter, base).chat_template == ""  # the model's own
    (adapter / "chat_template.jinja").write_text(TEMPLATE)
    assert read(adapter, base).chat_template == TEMPLATE
    assert read(adapter, base, "--chat-template", "{{ messages }}").chat_template == ""
    own = base.written_by(TEMPLATE)
    assert own is base.written_by(TEMPLATE) is not base is base.written_by("")
    asked: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    assert own.chat.render(asked, tools=[]) == "HELLO" != base.chat.render(asked)
    assert own.chat.overhead == 0 < base.chat.overhead
    (adapter / "chat_template.jinja").write_text("{% for")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: The chat template is not valid Jinja"):
        read(adapter, base)


def test_an_adapter_has_a_fingerprint_of_its_own(base: Tokenizer, tmp_path: Path) -> None:
    facts = changed(FakeFrontend().facts, fingerprint="fp_1")
    adapters = [read(write_adapter(tmp_path / str(seed), seed=seed), base) for seed in (1, 2)]
    found = [facts, *(facts_with(facts, AdapterState(each)) for each in adapters)]
    assert len({each.ready.worker.fingerprint for each in found}) == 3


def test_another_tokenizer_than_the_models_is_refused_by_what_differs(
    base: Tokenizer, folder: Path, tmp_path: Path
) -> None:
    adapter, told = write_adapter(tmp_path / "sql"), json.loads((folder / "tokenizer.json").read_text())
    path = adapter / "tokenizer.json"
    path.write_text(json.dumps(told, indent=1))  # other bytes with the same meaning
    read(adapter, base)
    more = {
        **told,
        "added_tokens": [
            *told["added_tokens"],
            {**told["added_tokens"][0], "id": 1 << 16, "content": "<sql>"},
        ],
    }
    path.write_text(json.dumps(more))
    with pytest.raises(
        ConfigError, match=r"is not the tokenizer .*: 1 tokens are not the same, such as '<sql>'"
    ):
        read(adapter, base)
    read(adapter, base, "--skip-tokenizer-init")
    path.write_text(json.dumps({**told, "pre_tokenizer": {"type": "WhitespaceSplit"}}))
    with pytest.raises(ConfigError, match="it cuts texts into other tokens"):
        read(adapter, base)
    path.write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        read(adapter, base)
