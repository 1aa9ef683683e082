"""What clients and the log are told of fields that have no effect."""

import logging

import pytest
from fastapi import Response

from server.http import warnings
from server.http.warnings import tell_unknown
from server.schemas.unknown_fields import FieldNotes


@pytest.fixture(autouse=True)
def logged(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    logged: dict[str, set[str]] = {}
    monkeypatch.setattr(warnings, "_logged", logged)
    return logged


def tell(client: str, *names: str) -> str:
    response = Response()
    tell_unknown(response, FieldNotes(foreign=[*names]), client)
    return response.headers["warning"]


def test_each_answer_has_a_header_and_each_client_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        told = [tell(client, "zz") for client in ("a", "a", "b")]
        tell("a", "zz", 'y"\n')
    assert told == ['299 - "fields without effect: zz"'] * 3
    assert caplog.messages == [
        "a sends fields that have no effect here: zz",
        "b sends fields that have no effect here: zz",
        "a sends fields that have no effect here: y??",
    ]


def test_the_header_names_a_few() -> None:
    assert tell("a", *"abcdefg").endswith('effect: a, b, c, d, e and 2 more"')


def test_memory_and_log_are_bounded(
    caplog: pytest.LogCaptureFixture, logged: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, "_MOST_CLIENTS", 2)
    monkeypatch.setattr(warnings, "_MOST_FIELDS", 3)
    with caplog.at_level(logging.INFO):
        for number in range(9):
            tell("a", f"x{number}")
    assert len(caplog.messages) == len(logged["a"]) == 3
    for client in "bcd":
        tell(client, "zz")
    assert [*logged] == ["c", "d"]
