"""`facet chat`, `complete` and `models` against the real HTTP API, in pipes and on a pretended terminal."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_frontend import FakeFrontend
from media_frontend import let_see
from served_app import served

from server.errors import loading
from server.options.server_flags import AccessOptions
from server.run.commands import BAD_USAGE, FAILED, run
from server.terminal.chat import Chat, Speed, typed_messages
from server.terminal.console import Screen, safe_text
from server.terminal.progress_bar import ProgressBar
from server.terminal.server_client import ServerClient, ServerError

pytestmark = pytest.mark.slow(2)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


Conversation = tuple[Chat, Terminal, Terminal]


@pytest.fixture
def conversation(url: str) -> Iterator[Conversation]:
    out, remarks = Terminal(), Terminal()
    with ServerClient(url) as server:
        yield Chat(server, Screen(out, remarks), "org/tiny"), out, remarks


def typed(*lines: str) -> Callable[[str], str]:
    rest = list(lines)

    def read(prompt: str) -> str:
        if not rest:
            raise EOFError
        return rest.pop(0)

    return read


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_a_quick_message_is_answered_in_a_pipe(
    url: str, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("facet", ["chat", "--url", url + ending, "-q", "hi"]) == 0
    assert capsys.readouterr().out == "Hello, world.\n"


@pytest.mark.parametrize("command", ["chat", "complete"])
@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_pipe_is_no_message(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, text: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert run("facet", [command, "--url", url]) == BAD_USAGE
    assert capsys.readouterr() == (
        "",
        "error: standard input is empty: give a text through a pipe, or with --quick\n",
    )


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_is_closed_is_as_one_that_nobody_reads(
    url: str, frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    monkeypatch.setattr(f"sys.{stream}", None)
    assert run("facet", ["chat", "--url", url, "-q", "hi"]) == 0
    assert len(frontend.asked) == 1


def test_letters_that_a_terminal_does_not_know_are_escaped(
    url: str, frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend.reply = "über 🙂"
    out = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, "latin-1"))
    assert run("facet", ["chat", "--url", url, "-q", "hi"]) == 0
    assert out.getvalue() == b"\xfcber \\U0001f642\n"


def test_without_standard_input_there_is_no_message(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert run("facet", ["chat", "--url", url]) == BAD_USAGE
    assert capsys.readouterr().err.startswith("error: standard input is empty")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_pipe_that_brings_no_text_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], errors: str
) -> None:
    pipe = io.TextIOWrapper(io.BytesIO("Grüße".encode("latin-1")), "utf-8", errors)
    monkeypatch.setattr("sys.stdin", pipe)
    assert run("facet", ["chat", "--url", url]) == BAD_USAGE
    assert capsys.readouterr() == ("", "error: standard input is not text in UTF-8\n")


def test_what_a_pipe_brings_is_one_message(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert run("facet", ["chat", "--url", url, "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == "Hello\n"


def test_a_text_is_gone_on_with(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("facet", ["complete", "--url", url, "-q", "Once", "--max-tokens", "7"]) == 0
    assert capsys.readouterr().out == "Hello, \n"


def test_a_conversation_is_remembered_and_begun_anew(conversation: Conversation) -> None:
    chat, out, remarks = conversation
    chat.say("one")
    chat.say("two")
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert out.getvalue() == "Hello, world.\n" * 2
    assert "tokens" in remarks.getvalue()
    assert chat.obey("/again")
    assert [message["content"] for message in chat.messages[-2:]] == ["two", "Hello, world."]
    assert chat.obey("/system Be brief.")
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    assert not chat.obey("/exit")


def test_fields_are_sent_with_every_request(conversation: Conversation) -> None:
    chat, out, remarks = conversation
    chat.obey("/set max_tokens 5")
    chat.say("one")
    assert out.getvalue() == "Hello\n"
    chat.obey("/set max_tokens many")
    with pytest.raises(ServerError, match="max_tokens"):
        chat.say("two")
    assert chat.messages[-1]["content"] == "Hello"  # what was not answered can be sent again
    assert chat.obey("/clear") and chat.obey("/again")
    assert chat.messages == []  # until it is forgotten with the rest
    chat.obey("/set model other")
    assert "model cannot be set" in remarks.getvalue()


def test_pictures_go_with_the_next_message(
    frontend: FakeFrontend, conversation: Conversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    def refuse(self: ServerClient, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        sent.append(body["messages"][-1]["content"])
        raise ServerError("busy")

    let_see(frontend, max_media_mb=1)
    chat, _, remarks = conversation
    (tmp_path / "a b.png").write_bytes(b"\x89PNG")
    monkeypatch.setattr(ServerClient, "stream", refuse)
    assert chat.obey(f"/image {tmp_path}/a b.png")
    assert "a b.png goes with the next message" in remarks.getvalue()
    for _ in range(2):  # what was not answered keeps its pictures
        with pytest.raises(ServerError, match="busy"):
            chat.say("hi")
    chat.obey("/image")
    with pytest.raises(ServerError, match="busy"):
        chat.say("hi")
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}
    assert sent == [[part, {"type": "text", "text": "hi"}]] * 2 + ["hi"]
    (tmp_path / "a.mp4").write_bytes(b"mp4")
    chat.obey(f"/video {tmp_path}/a.mp4")
    with pytest.raises(ServerError, match="busy"):
        chat.say("hi")
    assert sent[-1][0] == {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,bXA0"}}
    monkeypatch.setattr(ServerClient, "get", lambda *_: {"data": []})  # a server of others tells no kinds
    (tmp_path / "a.mp3").write_bytes(b"mp3")
    chat.obey(f"/audio {tmp_path}/a.mp3")
    with pytest.raises(ServerError, match="busy"):
        chat.say("hi")
    assert sent[-1][-2] == {"type": "audio_url", "audio_url": {"url": "data:audio/mpeg;base64,bXAz"}}


def test_pictures_that_cannot_be_sent_are_told_in_a_sentence(
    url: str, frontend: FakeFrontend, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(bytes(3 << 18))
    asked = ["chat", "--url", url, "-q", "hi", "--image"]

    def refusal(path: Path | str) -> str:
        assert run("facet", [*asked, str(path)]) == FAILED
        return capsys.readouterr().err

    assert refusal(path) == "error: org/tiny takes no pictures\n"
    let_see(frontend, max_media_mb=1, limit_mm_per_prompt={"video": 0})
    asked[-1] = "--video"
    assert refusal(path) == "error: org/tiny takes no videos\n"
    asked[-1] = "--image"
    with path.open("ab") as file:
        file.write(bytes(3))
    assert refusal(path) == f"error: {path} is too large: the server takes 1048576 bytes of base64\n"
    assert refusal(tmp_path) == f"error: {tmp_path} cannot be read: Is a directory\n"
    assert refusal("none.png") == "error: none.png cannot be read: No such file or directory\n"
    assert "~nobody-here/a cannot be read: " in refusal("~nobody-here/a")


def test_models_are_chosen_by_name(conversation: Conversation) -> None:
    chat, _, remarks = conversation
    chat.obey("/model tiny")
    assert chat.model == "tiny"
    chat.obey("/model huge")
    assert (chat.model, "models: org/tiny, tiny" in remarks.getvalue()) == ("tiny", True)


def test_models_are_listed_with_their_tasks(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("facet", ["models", "--url", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "context", "length", "tasks"]
    assert lines[1].split()[:3] == ["org/tiny", "128", "generate"]
    assert run("facet", ["models", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"][1]["id"] == "tiny"


def test_loading_is_told(url: str, frontend: FakeFrontend, capsys: pytest.CaptureFixture[str]) -> None:
    frontend.status = loading("weights", 0.25)
    assert run("facet", ["models", "--url", url]) == FAILED
    assert "still loading: weights, 25%" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--url", "http://127.0.0.1:1"], "start the server, or name another with --url"),
        (["--url", "ftp://h"], "is not the address of a server"),
        (["--url", "http://[::1"], "is not the address of a server"),
    ],
)
def test_a_server_that_is_not_there_is_told_in_one_line(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("facet", ["chat", *arguments, "-q", "hi"]) == FAILED
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_a_model_that_is_not_there_is_told(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("facet", ["chat", "--url", url, "--model-name", "huge", "-q", "hi"]) == FAILED
    assert "has no model huge; it has org/tiny, tiny" in capsys.readouterr().err


def test_a_key_is_sent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with served(FakeFrontend(), access=AccessOptions(api_key=["secret"])) as url:
        assert run("facet", ["chat", "--url", url, "-q", "hi"]) == FAILED
        assert "--api-key" in capsys.readouterr().err
        monkeypatch.setenv("FACET_API_KEY", "secret")
        assert run("facet", ["chat", "--url", url, "-q", "hi"]) == 0
        monkeypatch.setenv("FACET_API_KEY", "wrong")
        assert run("facet", ["chat", "--url", url, "-q", "hi", "--api-key", "secret"]) == 0


def test_a_key_of_any_letters_is_sent_and_one_of_two_lines_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(FakeFrontend(), access=AccessOptions(api_key=["kü☃", "other"])) as url:
        monkeypatch.setenv("FACET_API_KEY", "kü☃ other\n")
        assert run("facet", ["chat", "--url", url, "-q", "hi"]) == 0
        assert run("facet", ["chat", "--url", url, "-q", "hi", "--api-key", "a\nb"]) == FAILED
        assert "the API key has a line's end" in capsys.readouterr().err


def test_several_lines_can_be_typed() -> None:
    lines = typed_messages(typed("one", "", '"""two', "", 'three"""', "four \\", "five", '"""', "six", '"""'))
    assert list(lines) == ["one", "two\n\nthree", "four \nfive", "six"]


def test_text_of_a_model_cannot_move_the_cursor() -> None:
    assert safe_text("a\x1b[2J\tb\nc") == "a\\x1b[2J\tb\nc"
    plain = io.StringIO()
    Screen(plain, plain).text("a\x1b[2J")
    assert plain.getvalue() == "a\x1b[2J"  # in a pipe, an answer is what the model wrote


def test_a_bar_is_drawn_on_a_terminal_only() -> None:
    quiet, shown = io.StringIO(), Terminal()
    for out in (quiet, shown):
        bar = ProgressBar(2, "text", out)
        bar.add()
        bar.close()
    assert quiet.getvalue().startswith("1 text in ")
    assert "1/2 texts" in shown.getvalue()


@pytest.mark.parametrize(("variable", "styled"), [(None, True), ("", True), ("1", False)])
def test_text_has_no_style_if_the_user_wants_none(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, styled: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if variable is not None:
        monkeypatch.setenv("NO_COLOR", variable)
    out, remarks = Terminal(), Terminal()
    screen = Screen(out, remarks)
    screen.reasoning("hm")
    screen.remark("done")
    dim, normal = ("\x1b[2m", "\x1b[0m") if styled else ("", "")
    assert (out.getvalue(), remarks.getvalue()) == (f"{dim}hm{normal}", f"{dim}done{normal}\n")


def test_one_token_is_told_as_one() -> None:
    pace = Speed()
    pace.count({"choices": [{}]})
    assert pace.summary().startswith("1 token, the first after ")


def test_a_stream_without_tokens_has_no_pace() -> None:
    assert Speed().summary() == "no token came"
