"""Logs have one handler and one line format; libraries log from warnings up."""

from __future__ import annotations

import logging

import pytest

from worker import logs


@pytest.fixture(autouse=True)
def _restore_logging():  # pyright: ignore[reportUnusedFunction]
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for floor in logs.FLOORS:
        logging.getLogger(floor).setLevel(logging.NOTSET)


def test_our_records_go_to_stderr_from_the_level_up(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("engine", "info")
    logging.getLogger("worker.runner").info("loaded")
    logging.getLogger("worker.runner").debug("details")
    logging.getLogger("library").info("chatter")
    logging.getLogger("library").warning("trouble")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["INFO    engine: loaded", "WARNING engine: trouble"]


def test_setup_again_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("one", "info")
    logs.setup("two", "DEBUG")
    logging.getLogger("models.loader").debug("once")
    assert capsys.readouterr().err.count("once") == 1


def test_unknown_level_names_the_known() -> None:
    with pytest.raises(ValueError, match="'loud': choose one of debug, info, warning"):
        logs.setup("engine", "loud")
