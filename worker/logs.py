"""Writes the log of a process to stderr: one handler, one line format. No other module has handlers.

Lines are text for people, or JSON objects for programs that collect logs (`--log-format json`). Log records
and all that Python prints to sys.stderr go through one thread, so that a full disk or a reader that does not
read stops nobody. Every floor uses this, so it imports no torch.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import json
import logging
import os
import re
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from typing import Any

from worker.host.line_writer import LineWriter

FLOORS = ("server", "engine_core", "worker", "models")
LEVELS = ("debug", "info", "warning", "error", "critical")

LAST_LINES_SECONDS = 0.5
"""Seconds for which a process that ends waits for its last lines to be written."""
_STDERR = 2
_PR_SET_NAME, _LONGEST_NAME = 15, 15  # a number of prctl, and the bytes of a name that Linux keeps
_JSON = "+json"
_DATE = "%Y-%m-%d %H:%M:%S"
_FILE = "@"
"""Stands before the path of a file of settings in a style."""
_CLEAR_LINE = "\x1b[K"
"""What removes the rest of a terminal's line: of a progress bar, over which a record is written."""
_ERROR = "error: "
_LINE, _LONGEST_REASON = 200, 1000
_CLAUSES = re.compile(r"(?<=[.;]) ")
_FOLDERS = re.compile(r"(?<!\S)/(?:[^/\s]+/)+(?=[^/\s]+/[^/\s])")
"""The folders of an absolute path that stands at the beginning of a word, but for the last."""
_ENCODING = sys.__stderr__.encoding if sys.__stderr__ is not None else "utf-8"

_log = logging.getLogger(__name__)


def style(level: str, form: str, config_file: str | None = None) -> str:
    """A level, a form of lines (text or json) and perhaps a file of settings, in the one word that `setup`
    takes, here or in a child."""
    word = level if form == "text" else f"{level}{_JSON}"
    return word if config_file is None else f"{word}{_FILE}{os.path.abspath(config_file)}"


def setup(process: str, style: str) -> None:
    """Send this process's records to stderr, and name the process.

    `style` is the level for our own code, with what `style()` adds to it; libraries only warn.
    """
    style, _, config_file = style.partition(_FILE)
    level = style.removesuffix(_JSON)
    if level.lower() not in LEVELS:
        raise ValueError(f"unknown log level {level!r}: choose one of {', '.join(LEVELS)}")
    guard_stderr()
    _set_process_name(process)
    handler, as_json = _Handler(), level != style
    if as_json:
        handler.setFormatter(_JsonFormatter(process))
    else:
        clear = _CLEAR_LINE if os.isatty(_STDERR) else ""
        form = f"{clear}%(asctime)s %(levelname)-7s {process}: %(message)s"
        handler.setFormatter(_Formatter(form, _DATE))
    if isinstance(sys.stderr, _Stderr):
        sys.stderr.process = process if as_json else None
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for floor in FLOORS:
        logging.getLogger(floor).setLevel(level.upper())
    if config_file:
        try:
            apply_config(config_file)
        except ValueError as error:  # on another machine than that of the command line, which checks it
            _log.error("%s; the log is written as usual", error)


def apply_config(file: str) -> None:
    """Apply a JSON file of what `logging.config.dictConfig` takes. Raises ValueError if it cannot be used.

    Loggers that it does not name stay as they are, unless it says otherwise. What it says of a logger `vllm`
    holds for all of ours, so that files for vLLM work.
    """
    from logging.config import dictConfig  # imports servers and handlers, which few need

    try:
        with open(file, encoding="utf-8") as opened:
            settings = json.load(opened)
        if not isinstance(settings, dict):
            raise ValueError("a JSON object is needed, as logging.config.dictConfig takes it")
        loggers = settings.get("loggers", {})
        ours = dict.fromkeys(FLOORS, loggers["vllm"]) if "vllm" in loggers else {}
        dictConfig({"disable_existing_loggers": False, **settings, "loggers": {**ours, **loggers}})
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(f"--log-config-file {file}: {error.__cause__ or error}") from error


def _set_process_name(name: str) -> None:
    """Show this process as `facet: NAME` in `top` and `ps -o comm`, where the system has such names.

    Called in the main thread. The command line stays: scripts find processes by it.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # only Linux has it
        prctl(_PR_SET_NAME, shown_name(name).encode(), 0, 0, 0)


def shown_name(name: str) -> str:
    """The name of a process, which loses its space and then its end if it is too long."""
    whole = f"facet: {name}"
    return whole if len(whole) <= _LONGEST_NAME else f"facet:{name}"[:_LONGEST_NAME]


def guard_stderr() -> None:
    """Let no print to sys.stderr wait or fail from now on. `setup` does this, too."""
    if not isinstance(sys.stderr, _Stderr):
        _open_standard_files()
        sys.stderr = _Stderr()


def flush() -> None:
    """Wait for the lines so far to be written, at most LAST_LINES_SECONDS. Needed before os._exit() only."""
    _writer().flush(LAST_LINES_SECONDS)


def dropped() -> int:
    """The number of lines of this process that could not be written."""
    return _writer().dropped if isinstance(sys.stderr, _Stderr) else 0


def printable(text: str) -> str:
    """Returns a text with all characters escaped that could move a terminal's cursor or begin a new line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(error: BaseException) -> str:
    """The text of an error without line breaks, with the type of one that was not foreseen."""
    text = " ".join(str(error).split())
    known = isinstance(error, (ValueError, OSError)) and text
    return shorten(text if known else f"{type(error).__name__}: {text}")


def shorten(text: str) -> str:
    """Make a text at most 1,000 characters long, and take from it what a terminal obeys.

    In one that does not fit into a line of 200 characters behind "error: ", paths lose their beginnings: the
    names in a checkpoint say enough, and the log at debug says all.
    """
    text = printable(text)
    if len(_ERROR + text) > _LINE:
        text = _FOLDERS.sub(".../", text)
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 4].rstrip()} ..."


def error_text(reason: str) -> str:
    """Returns what a process prints of the reason why it ends, as lines of whole clauses.

    A line has at most 200 characters, unless one clause has more. All but the first are indented, so that
    none can be taken for another message.
    """
    lines, line = [], _ERROR
    for clause in _CLAUSES.split(printable(reason)):
        if line.strip() and line != _ERROR and len(line + clause) > _LINE:
            lines.append(line.rstrip())
            line = " " * len(_ERROR)
        line += clause + " "
    return "\n".join([*lines, line.rstrip()])


def print_error(reason: str) -> None:
    """Print to stderr why this process ends."""
    print(error_text(reason) + "\n", end="", file=sys.stderr)  # at once, for one JSON object


def last_error(printed: str) -> str | None:
    """Returns the reason in the last `error_text` among the lines that a process printed, if there is one."""
    reason: str | None = None
    for line in printed.splitlines():
        if line.startswith(_ERROR):
            reason = line.removeprefix(_ERROR)
        elif reason is not None and line.startswith(" " * len(_ERROR)):
            reason += " " + line.strip()
    return reason


@cache
def _writer() -> LineWriter:
    writer = LineWriter(_STDERR, _say_what_was_lost)
    atexit.register(writer.flush, LAST_LINES_SECONDS)
    return writer


def _say_what_was_lost(lines: int) -> None:
    _log.warning("%d lines of this log were dropped: they were not read in time, or the disk was full", lines)


def _open_standard_files() -> None:
    """Open those of stdin, stdout and stderr without which the process began, to /dev/null.

    Sockets and files that are opened later would get their numbers, which libuv takes for an error.
    """
    for number, stream in enumerate((sys.__stdin__, sys.__stdout__, sys.__stderr__)):
        if stream is not None:
            continue
        with suppress(OSError):
            os.fstat(number)
            if number != _STDERR:
                continue  # it is open
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)
        os.set_inheritable(number, True)


def write_info(logger: logging.Logger, message: str) -> bool:
    """Write the line of a record at INFO without making the record; returns False if somebody else handles or
    filters records of this logger."""
    handlers = logging.root.handlers
    if len(handlers) != 1 or type(handlers[0]) is not _Handler or not logger.isEnabledFor(logging.INFO):
        return False
    each: logging.Logger | None = logger
    while each is not None and each is not logging.root:
        if each.handlers or each.filters or not each.propagate:
            return False
        each = each.parent
    handlers[0].write_info(logger.name, message)
    return True


class _Handler(logging.Handler):
    def write_info(self, name: str, message: str) -> None:
        if isinstance(self.formatter, (_Formatter, _JsonFormatter)):
            _writer().put(_encoded(self.formatter.info_line(name, message) + "\n"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
        else:
            _writer().put(_encoded(line + "\n"))


class _Formatter(logging.Formatter):
    """A record is one line and a traceback is indented, so no text from outside can look like a record."""

    _second, _stamp = 0, ""
    """The last second of which a line was made without a record, and how it is written."""

    def info_line(self, name: str, message: str) -> str:
        if (now := int(time.time())) != self._second:
            self._second, self._stamp = now, time.strftime(_DATE, time.localtime(now))
        fields = {"asctime": self._stamp, "levelname": "INFO", "message": printable(message)}
        return self._fmt % fields if self._fmt else message

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message.rstrip("\n"))
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join("  " + printable(line) for line in super().formatException(ei).split("\n"))


class _JsonFormatter(logging.Formatter):
    """A record is one JSON object in one line, with its traceback as a field."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def info_line(self, name: str, message: str) -> str:
        return _json_line(self._process, time.time(), "INFO", message, {"logger": name})

    def format(self, record: logging.LogRecord) -> str:
        more = {"logger": record.name}
        if record.exc_info:
            more["traceback"] = self.formatException(record.exc_info)
        return _json_line(self._process, record.created, record.levelname, record.getMessage(), more)


def _json_line(process: str, seconds: float, level: str, message: str, more: dict[str, str]) -> str:
    moment = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    fields = {"time": moment, "level": level.lower(), "process": process, "pid": os.getpid()}
    return json.dumps({**fields, "message": message.rstrip("\n"), **more})


class _Stderr(io.TextIOBase):
    """Takes the place of sys.stderr: hands what is printed to the writer, whole lines if it can."""

    encoding = _ENCODING

    def __init__(self) -> None:
        self.process: str | None = None
        """The name of this process if its lines shall be JSON."""
        self._begun = ""
        self._lock = threading.RLock()  # a signal handler may print within a print

    def write(self, text: str, /) -> int:
        with self._lock:
            lines, newline, self._begun = (self._begun + text).rpartition("\n")
            if newline:
                _writer().put(_encoded(self._formed(lines) + newline))
        return len(text)

    def _formed(self, lines: str) -> str:
        """Printed lines as the log has them: as they are, or each as an object."""
        if self.process is None:
            return lines
        now = time.time()
        return "\n".join(
            _json_line(self.process, now, "error" if line.startswith(_ERROR) else "info", line, {})
            for line in lines.replace("\n" + " " * len(_ERROR), " ").split("\n")
        )

    def flush(self) -> None:
        with self._lock:
            if self._begun and self.process is None:  # an object needs its whole line
                _writer().put(_encoded(self._begun))
                self._begun = ""

    def fileno(self) -> int:
        return _STDERR

    def isatty(self) -> bool:
        return os.isatty(_STDERR)

    def writable(self) -> bool:
        return True


def _encoded(text: str) -> bytes:
    return text.encode(_ENCODING, "backslashreplace")
