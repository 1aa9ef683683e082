"""A file of keys is read whole, or refused with the line and field of its first mistake."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from server.access.key_file import KeyFileError, parse_keys, read_keys

DIGEST = "0123456789abcdef" * 4
OTHER = DIGEST[::-1]
EVERYTHING = f"""
# Keys of the team.
[[keys]]
name = "alice"
sha256 = "{DIGEST}"
weight = 3
max_running = 4
max_queued = 0
requests_per_minute = 60
tokens_per_minute = 10_000
priority = -2
tasks = ["generate", "embed"]
admin = true
expires = 2027-01-31T12:00:00+01:00
share_prefixes = true

[[ keys ]]  # has all the defaults
name = "bob@example.com"
sha256 = "{OTHER}"
expires = 2027-01-31
"""


def entry(**fields: str) -> str:
    lines = {"name": '"alice"', "sha256": f'"{DIGEST}"', **fields}
    return "\n".join(["[[keys]]", *(f"{name} = {value}" for name, value in lines.items() if value)]) + "\n"


def refusal(text: str) -> str:
    with pytest.raises(KeyFileError) as caught:
        parse_keys(text, "keys.toml")
    message = str(caught.value)
    assert message.startswith("keys.toml: ") and "\n" not in message
    return message.removeprefix("keys.toml: ")


def test_every_field_is_read() -> None:
    alice, bob = parse_keys(EVERYTHING, "keys.toml")
    assert (alice.name, alice.weight, alice.max_running, alice.max_queued) == ("alice", 3.0, 4, 0)
    assert (alice.requests_per_minute, alice.tokens_per_minute, alice.priority) == (60, 10_000, -2)
    assert (alice.tasks, alice.admin, alice.share_prefixes) == (["generate", "embed"], True, True)
    assert alice.expires == datetime(2027, 1, 31, 11, tzinfo=UTC)
    assert (bob.weight, bob.max_running, bob.max_queued, bob.tasks, bob.admin) == (
        1.0,
        None,
        None,
        None,
        False,
    )
    assert bob.expires == datetime(2027, 1, 31, tzinfo=UTC)


def test_a_file_without_keys_is_one() -> None:
    assert parse_keys("", "keys.toml") == []


@pytest.mark.parametrize(
    ("fields", "line", "field", "text"),
    [
        ({"weight": "0"}, 4, "weight", "Expected float >= 0.001"),
        ({"weight": '"3"'}, 4, "weight", "Expected float, got str"),
        ({"weight": "nan"}, 4, "weight", "Expected float"),
        ({"max_running": "0"}, 4, "max_running", "Expected int >= 1"),
        ({"max_running": "true"}, 4, "max_running", "Expected int | null, got bool"),
        ({"tokens_per_minute": "1.5"}, 4, "tokens_per_minute", "got float"),
        ({"tasks": '["generate", "dance"]'}, 4, "tasks", "Invalid enum value 'dance'"),
        (
            {"models": "{chat = {requests = 1}}"},
            4,
            "models",
            "there are requests_per_minute, tokens_per_minute",
        ),
        ({"models": "{chat = {tokens_per_minute = 0}}"}, 4, "models", ">= 1"),
        ({"tasks": '"generate"'}, 4, "tasks", "Expected array | null, got str"),
        ({"name": '"has/slash"'}, 2, "name", "a letter, then"),
        ({"name": '"10.0.0.1"'}, 2, "name", "a letter, then"),
        ({"sha256": '"secret"'}, 3, "sha256", "64 hexadecimal digits"),
        ({"sha256": ""}, 1, "sha256", "the key has none"),
        ({"wieght": "3"}, 4, "wieght", "there is no such field; there are name, sha256, weight"),
        ({"expires": '"tomorrow"'}, 4, "expires", "write a date, such as 2027-01-31"),
        ({"expires": "2027-01-31T12:00:00"}, 4, "expires", "needs an offset"),
        ({"admin": "1"}, 4, "admin", "Expected bool"),
    ],
)
def test_a_mistake_is_told_with_its_line(fields: dict[str, str], line: int, field: str, text: str) -> None:
    message = refusal(entry(**fields))
    assert message.startswith(f"line {line}: {field}: ")
    assert text in message


def test_the_line_is_that_of_the_right_key() -> None:
    second = entry(name='"bob"', sha256=f'"{OTHER}"', weight="-1")
    assert refusal(entry(weight="1") + "\n" + second).startswith("line 9: weight: ")


def test_names_and_keys_are_different() -> None:
    twice = entry() + entry(sha256=f'"{OTHER}"')
    assert refusal(twice) == "line 5: name: the key at line 1 has the same"
    assert refusal(entry() + entry(name='"bob"')) == "line 6: sha256: the key at line 1 has the same"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[keys]]\nname = "alice', "(at line 2, the last)"),
        ("[server]\nport = 1\n", "line 1: server: "),
        ("keys = 3\n", "line 1: keys: write a table [[keys]]"),
        ('[keys]\nname = "a"\n', "line 1: keys: write a table [[keys]]"),
        ('keys = [{name = "alice"}]\n', "key number 1: sha256: the key has none"),
        ("a = " + "[" * 50_000, ""),
    ],
)
def test_what_is_no_file_of_keys_is_refused(text: str, told: str) -> None:
    assert told in refusal(text)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b'[[keys]]\nname = "\xff"')
    for path, told in ((tmp_path / "none", "no such file"), (tmp_path, "no such file"), (bad, "line 2: ")):
        with pytest.raises(KeyFileError, match=told) as caught:
            read_keys(path)
        assert str(path) in str(caught.value)
