"""Logs have one handler and one line format; libraries log from warnings up; no text forges lines."""

import json
import logging
import os
import pty
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import TextIO

import pytest

from worker import logs


@pytest.fixture(autouse=True)
def _restore_logging(monkeypatch: pytest.MonkeyPatch):  # pyright: ignore[reportUnusedFunction]
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # set back after the test
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for floor in logs.FLOORS:
        logging.getLogger(floor).setLevel(logging.NOTSET)


def written(capfd: pytest.CaptureFixture[str]) -> str:
    logs.flush()
    return capfd.readouterr().err


def test_our_records_go_to_stderr_from_the_level_up(capfd: pytest.CaptureFixture[str]) -> None:
    logs.setup("engine", "info")
    logging.getLogger("worker.runner").info("loaded")
    logging.getLogger("worker.runner").debug("details")
    logging.getLogger("library").info("chatter")
    logging.getLogger("library").warning("trouble")
    lines = written(capfd).splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["INFO    engine: loaded", "WARNING engine: trouble"]


def test_setup_again_replaces(capfd: pytest.CaptureFixture[str]) -> None:
    logs.setup("one", "info")
    logs.setup("two", "DEBUG")
    logging.getLogger("models.loader").debug("once")
    assert written(capfd).count("once") == 1


def test_unknown_level_names_the_known() -> None:
    with pytest.raises(ValueError, match="'loud': choose one of debug, info, warning"):
        logs.setup("engine", "loud")


def test_prints_take_the_same_way_in_the_same_order(capfd: pytest.CaptureFixture[str]) -> None:
    logs.setup("engine", "info")
    print("begun", end="", file=sys.stderr)
    print(", ended", file=sys.stderr)
    logging.getLogger("worker").info("between")
    print("shown at once", end="", file=sys.stderr, flush=True)
    first, second, third = written(capfd).splitlines()
    assert (first, third) == ("begun, ended", "shown at once") and second.endswith("between")


def test_control_characters_are_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    logs.setup("engine", "info")
    name = "m\x1b]0;title\x07\x9b31m\r\n2026-01-01 00:00:00 INFO forged\u2028\u202e\x7f 模型 é"
    logging.getLogger("server").info("the name is %s", name)
    (line,) = written(capfd).splitlines()
    assert line.endswith(
        r"m\x1b]0;title\x07\x9b31m\r\n2026-01-01 00:00:00 INFO forged\u2028\u202e\x7f 模型 é"
    )


def test_on_a_terminal_a_record_clears_the_bar_over_which_it_is_written() -> None:
    code = (
        "import logging\nfrom worker import logs\nlogs.setup('engine', 'info')\n"
        "logging.getLogger('worker').info('loaded')"
    )
    reader, terminal = pty.openpty()
    with open(reader, "rb", buffering=0) as shown:
        subprocess.run([sys.executable, "-c", code], stderr=terminal, timeout=60, check=True)
        line = shown.read(200)
        os.close(terminal)
    assert line.startswith(b"\x1b[K2") and line.endswith(b" INFO    engine: loaded\r\n")


def test_a_traceback_is_indented_and_its_text_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    logs.setup("engine", "info")
    try:
        raise ValueError("no\n2026-01-01 00:00:00 INFO    engine: forged \x1b[2J")
    except ValueError:
        logging.getLogger("server").exception("failed\n")
    first, *rest = written(capfd).split("\n")[:-1]
    assert first.endswith("ERROR   engine: failed")
    assert rest[0] == "  Traceback (most recent call last):"
    assert rest[-1] == r"  2026-01-01 00:00:00 INFO    engine: forged \x1b[2J"


BEGIN = """
import logging, sys
from worker import logs
logs.setup("server", "info")
log = logging.getLogger("server")
"""


def in_a_process(
    code: str, stderr: TextIO | int = subprocess.PIPE, closed: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs code after the setup of logs, with this stderr, or with descriptors that a shell has `closed`."""
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", BEGIN + code]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60)


def test_the_last_lines_before_an_exit_are_written() -> None:
    done = in_a_process("for n in range(900): log.info('line %d', n)\nprint('error: last', file=sys.stderr)")
    lines = done.stderr.splitlines()
    assert (len(lines), lines[-1]) == (901, "error: last")


def test_the_traceback_of_an_end_that_nobody_foresaw_is_written() -> None:
    done = in_a_process("log.info('before')\n1 / 0")
    assert done.returncode == 1 and done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_full_disk_changes_neither_the_work_nor_the_exit_code() -> None:
    with open("/dev/full", "w") as full:
        done = in_a_process(
            "log.info('one'); print('two', file=sys.stderr); logs.flush(); print(logs.dropped())", full
        )
    assert (done.returncode, done.stdout) == (0, "2\n")


def test_a_process_that_nobody_reads_ends_all_the_same() -> None:
    """Its pipe is full: 300 KB are written, nobody reads, and both ends stay open until it has ended."""
    code = (
        "import os; r, w = os.pipe(); os.dup2(w, 2)\n"
        "for n in range(3000): log.info('x' * 100)\n"
        "print(logs.dropped() > 1000)\nraise SystemExit(3)"
    )
    done = in_a_process(code, subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (3, "True\n")


def test_a_process_without_a_stderr_keeps_its_number_from_others() -> None:
    code = "import os; print(os.path.samestat(os.fstat(2), os.stat(os.devnull))); log.info('heard by nobody')"
    done = in_a_process(code, closed="2>&-")
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_a_process_without_stdin_and_stdout_keeps_their_numbers_from_others() -> None:
    code = (
        "import os, socket; null = os.stat(os.devnull)\n"
        "print([os.path.samestat(os.fstat(n), null) for n in (0, 1)], file=sys.stderr, end=' ')\n"
        "print(socket.socket().fileno() > 2, file=sys.stderr)"
    )
    done = in_a_process(code, closed="<&- >&-")
    assert (done.returncode, done.stderr) == (0, "[True, True] True\n")


def test_an_error_is_told_whole_and_its_paths_are_short() -> None:
    short = ValueError("/models/a/config.json: the field 'x'\n is wrong")
    assert logs.one_line(short) == "/models/a/config.json: the field 'x' is wrong"
    long = logs.one_line(ValueError(f"/models/{'a' * 200}/b/config.json: the field 'x' is '/etc/a/b'"))
    assert long == ".../b/config.json: the field 'x' is '/etc/a/b'"
    longer = logs.one_line(KeyError("model.safetensors: " + "x " * 600))
    assert longer.startswith("KeyError: 'model.safetensors: x x") and longer.endswith(" ...")
    assert len(longer) <= 1000


def test_the_advice_of_a_long_error_stands_on_a_line_of_its_own() -> None:
    reason = (
        f"the hub has no {'x' * 150} that can be seen; {'give a folder, or go online, ' * 4}and try again"
    )
    lines = logs.error_text(reason).split("\n")
    assert [line[:20] for line in lines] == ["error: the hub has n", "       give a folder"]
    assert max(map(len, lines)) <= 200
    assert logs.last_error("\n".join(["error: another", "INFO a line", *lines, "INFO the end"])) == reason
    assert logs.last_error("INFO all is well") is None


def test_an_error_gives_a_terminal_no_orders() -> None:
    assert logs.one_line(OSError("a\x1b[2Jb\x07\u202ec é")) == r"a\x1b[2Jb\x07\u202ec é"


def test_an_error_of_several_lines_is_one_object(capfd: pytest.CaptureFixture[str]) -> None:
    logs.setup("engine 1", logs.style("info", "json"))
    logs.print_error(f"{'x' * 190}; then do this")
    logs.flush()
    [line] = capfd.readouterr().err.splitlines()
    assert json.loads(line)["message"] == f"error: {'x' * 190}; then do this"


def test_lines_may_be_json(capfd: pytest.CaptureFixture[str]) -> None:
    logs.setup("engine 1", logs.style("info", "json"))
    logging.getLogger("worker").info("a %s\nb", "\x1b[2J")
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("worker.runner").exception("broke")
    print("error: printed", end="", file=sys.stderr, flush=True)
    print("\nmore", file=sys.stderr)
    said, broke, printed, more = map(json.loads, written(capfd).splitlines())
    assert (said["level"], said["process"], said["message"]) == ("info", "engine 1", "a \x1b[2J\nb")
    assert datetime.fromisoformat(said["time"]).tzinfo is not None
    assert (broke["logger"], "ValueError: why" in broke["traceback"]) == ("worker.runner", True)
    assert (printed["level"], printed["message"]) == ("error", "error: printed")
    assert (more["level"], more["message"]) == ("info", "more")


def test_a_style_keeps_its_level() -> None:
    assert logs.style("debug", "text") == "debug"
    with pytest.raises(ValueError, match="unknown log level 'loud'"):
        logs.setup("engine", logs.style("loud", "json"))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        *(("engine", "facet: engine"), ("engine 0", "facet: engine 0"), ("engine 10", "facet:engine 10")),
        ("supervisor", "facet:superviso"),
    ],
)
def test_names_fit_into_what_the_system_keeps(name: str, shown: str) -> None:
    assert logs.shown_name(name) == shown


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="only Linux shows names of processes")
def test_the_system_shows_the_name() -> None:
    program = "from worker import logs; logs.setup('engine 3', 'info'); print(open('/proc/self/comm').read())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "facet: engine 3"


def test_settings_of_a_file_hold_in_every_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, target = tmp_path / "logging.json", tmp_path / "log"
    handler = {"class": "logging.FileHandler", "filename": str(target), "formatter": "short"}
    settings = {
        "version": 1,
        "formatters": {"short": {"format": "%(name)s: %(message)s"}},
        "handlers": {"file": handler},
        "loggers": {"vllm": {"handlers": ["file"], "level": "DEBUG", "propagate": False}},
    }
    file.write_text(json.dumps(settings))
    logs.setup("engine", logs.style("info", "text", str(file)))
    logging.getLogger("worker.runner").debug("details")
    logging.getLogger("library").warning("trouble")
    assert target.read_text() == "worker.runner: details\n"
    assert "trouble" in written(capfd), "a logger that is not named stays as it is"
    for floor in logs.FLOORS:
        logger = logging.getLogger(floor)
        logger.propagate = True
        for own in logger.handlers[:]:
            logger.removeHandler(own)
            own.close()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ("[]", "a JSON object is needed"),
        ("{}", "doesn't specify a version"),
        ('{"version": 1, "handlers": {"a": {"class": "no.Such"}}}', "No module named 'no'"),
    ],
)
def test_a_file_of_settings_that_cannot_be_used(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "logging.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=r"--log-config-file .*logging\.json: ") as refused:
        logs.apply_config(str(file))
    assert said in str(refused.value)


def test_a_machine_without_the_file_logs_as_usual(capfd: pytest.CaptureFixture[str]) -> None:
    logs.setup("rank 1", logs.style("info", "text", "/nowhere/logging.json"))
    assert "the log is written as usual" in written(capfd)


@pytest.mark.parametrize("style", ["info", "info+json"])
def test_a_line_without_a_record_is_that_of_a_record(style: str, capfd: pytest.CaptureFixture[str]) -> None:
    logs.setup("server", style)
    logger = logging.getLogger("worker.access")
    assert logs.write_info(logger, "a\x1bb")
    logger.info("a\x1bb")
    first, second = written(capfd).splitlines()
    if style == "info":
        assert first[19:] == second[19:]
    else:
        assert {**json.loads(first), "time": ""} == {**json.loads(second), "time": ""}


def test_who_handles_records_of_its_own_gets_them(caplog: pytest.LogCaptureFixture) -> None:
    assert not logs.write_info(logging.getLogger("worker.access"), "a")  # the test's own handler wants it
