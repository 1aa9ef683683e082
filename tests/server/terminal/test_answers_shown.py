"""How `facet chat` shows answers: lines end between words, and an answer that repeats itself is stopped."""

import io
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fake_frontend import FakeFrontend
from served_app import served

from server.terminal.chat import Chat
from server.terminal.console import CommandError, RepetitionGuard, Screen
from server.terminal.server_client import ServerClient, ServerError

STORY = "Zorath gave him a new throne made of a dragon's tail. "


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(*pieces: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """What stands on a terminal of so many columns; a word that was deleted is not there any more."""
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    screen = Screen(out, io.StringIO())
    for piece in pieces:
        screen.text(piece)
    text = out.getvalue()
    while (found := re.search(r"\x1b\[(\d+)D\x1b\[K", text)) is not None:
        text = text[: found.start() - int(found[1])] + text[found.end() :]
    return text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two three four", "one two\nthree four"),
        ("one twothree", "one\ntwothree"),
        ("1234567890 1", "1234567890\n1"),
        ("one\ntwo three four", "one\ntwo three\nfour"),
        ("a wordthatislongerthanaline", "a\nwordthatislongerthanaline"),
        ("```\nx = 1234567890\n```\none two three", "```\nx = 1234567890\n```\none two\nthree"),
        ("日本語 日本語", "日本語\n日本語"),
    ],
)
def test_lines_end_between_words(text: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for pieces in ([text], list(text)):
        lines = shown(*pieces, columns=11, monkeypatch=monkeypatch).split("\n")
        assert [line.rstrip() for line in lines] == expected.split("\n")


def test_a_pipe_gets_the_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "5")
    out = io.StringIO()
    Screen(out, io.StringIO()).text("one two three")
    assert out.getvalue() == "one two three"


def read_until_repeated(text: Iterator[str]) -> tuple[int, int]:
    """How many characters were read until they were found to repeat, and how many of them."""
    guard, read = RepetitionGuard(), 0
    for piece in text:
        read += len(piece)
        if count := guard.repeated(piece):
            return read, count
    return read, 0


@pytest.mark.parametrize("passage", ["ha", "no. ", STORY, STORY * 3 + "And then: "])
def test_a_passage_over_and_over_is_noticed(passage: str) -> None:
    pieces = itertools.islice(itertools.cycle(passage), 20_000)
    read, count = read_until_repeated(itertools.chain("Once upon a time. " * 2, pieces))
    assert count >= 500
    assert read < 1000 + 5 * len(passage)


def test_counting_lists_and_short_refrains_are_no_repetition() -> None:
    texts = [
        "".join(f"{number}. The number {number}\n" for number in range(500)),
        "".join(f"Verse {number}: {STORY[:number]}\nLa la la la la la la.\n" for number in range(54)),
        "0, " * 160,
        "\n".join(["| a | b | c |", "|---|---|---|", *(f"| {i} | {i * i} | {i**3} |" for i in range(99))]),
    ]
    assert [read_until_repeated(iter(text))[1] for text in texts] == [0] * len(texts)


def chunks(text: Iterator[str]) -> Iterator[dict[str, Any]]:
    return ({"choices": [{"delta": {"content": piece}}]} for piece in text)


def test_an_answer_that_repeats_itself_ends_on_a_terminal(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerClient, "stream", lambda *_: chunks(itertools.repeat(STORY, 200)))
    remarks, pipe = Terminal(), io.StringIO()
    with ServerClient(url) as server:
        chat, piped = (
            Chat(server, Screen(Terminal(), remarks), "tiny"),
            Chat(server, Screen(pipe, remarks), "tiny"),
        )
        chat.say("hi")
        assert "stopped: the answer repeats itself" in remarks.getvalue()
        assert chat.messages[-1] == {"role": "assistant", "content": STORY}
        remarks.truncate(0)
        piped.say("hi")
    assert pipe.getvalue() == STORY * 200 + "\n"
    assert "stopped" not in remarks.getvalue()


def test_a_field_that_no_request_has_is_refused_at_once(url: str) -> None:
    with ServerClient(url) as server:
        chat = Chat(server, Screen(Terminal(), Terminal()), "tiny")
        with pytest.raises(CommandError, match="no field temprature; did you mean temperature"):
            chat.obey("/set temprature 0")
        with pytest.raises(CommandError, match=r"no field zzqq; docs/api\.md lists them"):
            chat.obey("/set zzqq 0")
        chat.obey("/set top_k 5")
    assert chat.fields == {"top_k": 5}


def test_a_message_that_failed_is_sent_again() -> None:
    frontend = FakeFrontend()
    with served(frontend) as url, ServerClient(url) as server:
        remarks = Terminal()
        chat = Chat(server, Screen(Terminal(), remarks), "other")
        with pytest.raises(ServerError, match="does not exist"):
            chat.say("a long message")
        assert chat.messages == []
        chat.model = "tiny"
        assert chat.obey("/again")
    assert [message["content"] for message in chat.messages] == ["a long message", "Hello, world."]


def test_a_message_whose_answer_was_stopped_before_its_first_word_is_kept_beside() -> None:
    """Many templates refuse two messages of a user that follow each other."""

    class Interrupted(ServerClient):
        def stream(self, path: str, body: object) -> Iterator[dict[str, Any]]:
            raise KeyboardInterrupt

    chat = Chat(Interrupted(), Screen(Terminal(), Terminal()), "tiny")
    with pytest.raises(KeyboardInterrupt):
        chat.say("one")
    assert chat.messages == []
    frontend = FakeFrontend("")
    with served(frontend) as url, ServerClient(url) as server:
        answered = Chat(server, Screen(Terminal(), Terminal()), "tiny")
        answered.say("one")  # an answer without a word is one, too
    assert [message["role"] for message in answered.messages] == ["user", "assistant"]


def test_of_several_answers_the_first_is_shown() -> None:
    with served(FakeFrontend()) as url, ServerClient(url) as server:
        out = Terminal()
        chat = Chat(server, Screen(out, Terminal()), "tiny")
        chat.obey("/set n 2")
        chat.say("hi")
    assert out.getvalue() == "Hello, world.\n"
    assert chat.messages[-1]["content"] == "Hello, world."
