"""Tokenizers and templates that are none: a line names the file, or a warning names the template."""

import json
import os
import time
from pathlib import Path

import pytest
import zoo
from broken import Case, case, put, replaced
from live import PATIENCE

from server.errors import BadRequest
from server.text.chat_template import ChatTemplate
from server.text.tokenizer_files import TokenizerError, TokenizerFiles
from worker.logs import one_line

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
NAMES, TEMPLATE, OLD_TEMPLATE = "special_tokens_map.json", "chat_template.jinja", "chat_template.json"
DEEP = '{"a":' * 100_000
BROKEN = "{% for message in messages %}{{ message }"


def vocabulary(**model: object) -> str:
    whole = json.loads(zoo.byte_level().to_str())
    return json.dumps({**whole, "model": {**whole["model"], **model}})


FILES: list[Case] = [
    case("empty", put("", TOKENIZER), TOKENIZER, "cannot be read"),
    case("not JSON", put("{'a': 1}", TOKENIZER), TOKENIZER, "cannot be read"),
    case("half of it", put(vocabulary()[:500], TOKENIZER), TOKENIZER, "cannot be read"),
    case("no tokenizer", put("{}", TOKENIZER), TOKENIZER, "cannot be read"),
    case("a list", put("[]", TOKENIZER), TOKENIZER, "cannot be read"),
    case("nested", put(DEEP, TOKENIZER), TOKENIZER, "cannot be read"),
    case("no text", put(b"\xff\xfe", TOKENIZER), TOKENIZER, "cannot be read"),
    case("ids that are texts", put(vocabulary(vocab={"a": "b"}), TOKENIZER), TOKENIZER, "cannot be read"),
    case("an id below 0", put(vocabulary(vocab={"a": -1}), TOKENIZER), TOKENIZER, "cannot be read"),
    case("merges of no tokens", put(vocabulary(merges=["x y"]), TOKENIZER), TOKENIZER, "cannot be read"),
    case("a kind nobody knows", put(vocabulary(type="Foo"), TOKENIZER), TOKENIZER, "cannot be read"),
    case("a pipe", replaced(os.mkfifo, TOKENIZER), TOKENIZER, "is a pipe (FIFO)"),
    case("a folder", replaced(Path.mkdir, TOKENIZER), TOKENIZER, "is a folder"),
    case("gone", put(None, TOKENIZER), TOKENIZER, "no tokenizer.json, nor older"),
    case("settings that are not JSON", put("{", SETTINGS), SETTINGS, "cannot be read as JSON"),
    case("settings that are nested", put(DEEP, SETTINGS), SETTINGS, "nested too deeply"),
    case("settings that are a list", put("[]", SETTINGS), SETTINGS, "must hold an object"),
    case("settings that are a pipe", replaced(os.mkfifo, SETTINGS), SETTINGS, "is a pipe"),
    case("a nameless token", put('{"added_tokens_decoder": {"1": {}}}', SETTINGS), "added tokens", "content"),
    case("names that are not JSON", put("x", NAMES), NAMES, "cannot be read as JSON"),
    case("a template that is not text", put(b"\xff", TEMPLATE), TEMPLATE, "cannot be read as text"),
    case("a template that is a pipe", replaced(os.mkfifo, TEMPLATE), TEMPLATE, "is a pipe"),
    case("a template that is a folder", replaced(Path.mkdir, TEMPLATE), TEMPLATE, "is a folder"),
    case("an old template without one", put("{}", OLD_TEMPLATE), "chat templates", "unknown form"),
    case("an old template that is nested", put(DEEP, OLD_TEMPLATE), OLD_TEMPLATE, "nested too deeply"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    zoo.byte_level().save(str(tmp_path / "model" / TOKENIZER))
    return tmp_path / "model"


@pytest.mark.parametrize("broken", FILES, ids=lambda each: each.name)
def test_what_is_no_tokenizer_is_refused(broken: Case, folder: Path) -> None:
    broken.breaks(folder)
    started = time.monotonic()
    with pytest.raises(TokenizerError) as refused:
        TokenizerFiles(str(folder), str(folder / "cache")).load()
    assert time.monotonic() - started < 5 * PATIENCE
    line = f"error: {one_line(refused.value)}"
    assert len(line) <= 200
    assert [text for text in broken.told if text not in line] == [], line


class TestTemplates:
    """A model can be served without its template, so one that is broken ends no start."""

    def load(self, folder: Path) -> ChatTemplate:
        (folder / TEMPLATE).write_text(BROKEN)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "plain.jinja").write_text("{{ messages[0].content }}")
        return TokenizerFiles(str(folder), str(folder / "cache")).load().chat

    def test_the_start_is_told_which_one_is_broken_and_what_to_do(self, folder: Path) -> None:
        (fault,) = self.load(folder).faults
        assert fault.startswith("This model's chat template 'default' is not valid Jinja: unexpected '}'")
        assert "Start the server with --chat-template FILE, or send plain text" in fault

    def test_a_chat_is_told_the_same_and_another_template_works(self, folder: Path) -> None:
        chat = self.load(folder)
        messages = [{"role": "user", "content": "hello"}]
        with pytest.raises(BadRequest) as refused:
            chat.render(messages)
        assert [refused.value.message] == chat.faults
        assert chat.render(messages, template="plain") == "hello"

    def test_a_template_of_the_request_is_not_the_models(self, folder: Path) -> None:
        with pytest.raises(BadRequest, match=r"^The chat template is not valid Jinja"):
            self.load(folder).render([{"role": "user", "content": "x"}], template=BROKEN)
