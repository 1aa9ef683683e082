"""A file of keys: TOML, with a table `[[keys]]` for each. A mistake is told with its line and field.

`FollowedKeyFile` reads it again whenever it changes.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import tomllib
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from datetime import time as time_of_day
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from server.errors import Forbidden
from server.model_facts import Right
from server.options.option_parsing import OptionError

Name = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9._@-]{0,63}$")]
"""A letter, then letters, digits and . _ @ -; so no name is an address, and none has a slash in it."""
Limit = Annotated[int, Meta(ge=1, le=1 << 40)]

_FORMS = {
    "name": "it must be a letter, then up to 63 letters, digits and . _ @ -",
    "sha256": "it must be 64 hexadecimal digits in small letters",
}
_WHERE = re.compile(r" - at `\$\.?([A-Za-z0-9_]*)[^`]*`")


class ModelQuotas(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The quotas of a key for one model, within those that it has for all."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of the file: whose it is, and what its owner may do. The key itself is known by its digest."""

    name: Name
    """The name of its owner in logs, in metrics, and among those who share the server."""
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    """Its part of the server, in proportion to those of others."""
    max_running: Limit | None = None
    """The answers and texts that an engine computes for it at a time; others wait."""
    max_queued: Annotated[int, Meta(ge=0, le=1 << 40)] | None = None
    """The answers and texts that may wait."""
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    """Tokens of prompts and of answers together."""
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    """The lowest priority that it may ask for. Lower ones run earlier."""
    tasks: list[Right] | None = None
    """The tasks that it may be used for; None is all."""
    models: list[str] | dict[str, ModelQuotas] | None = None
    """The models that it may be used for, by names or aliases; in a table, each with quotas. None is all."""
    admin: bool = False
    """Whether it may read metrics and the description of the API, and abort requests of others."""
    expires: datetime | None = None
    """The moment from which it is not valid."""
    share_prefixes: bool = False
    """Whether it finds cached prefixes of other keys that share theirs, and they find its own."""

    def has_expired(self) -> bool:
        return self.expires is not None and self.expires.timestamp() <= time.time()

    def require(self, *rights: Right) -> None:
        """Raises Forbidden unless it may be used for one of these."""
        if self.tasks is not None and not any(right in self.tasks for right in rights):
            raise Forbidden(
                f"The API key of {self.name} may not be used for this: it is for "
                f"{', '.join(self.tasks) or 'nothing'}, and this is {' or '.join(rights)}."
            )

    def own_name(self, names: Collection[str]) -> str | None:
        """The name by which it may use the model of these names: empty if it may use all, None if not it."""
        return "" if self.models is None else next((name for name in self.models if name in names), None)

    def quotas_of(self, model: str) -> ModelQuotas | Key:
        """Its quotas for a model by that name, or for all if that is empty."""
        if not model:
            return self
        return self.models.get(model, ModelQuotas()) if isinstance(self.models, dict) else ModelQuotas()

    def salted(self, salt: str) -> str:
        """The salt of its entries in the prefix cache: no other key's, whatever salts requests bring."""
        return salt if self.share_prefixes else f"{self.name}/{salt}"


MOST_BYTES = 16 << 20

HEADER = re.compile(r"\s*\[\[\s*keys\s*\]\]\s*(#.*)?")
"""A line with which the table of a key begins."""
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")


class KeyFileError(OptionError):
    """A file of keys that cannot be used; the message is one line that names the file, line and field."""


def read_keys(path: Path) -> list[Key]:
    """Reads all keys of a file. Raises KeyFileError if anything is wrong with any of them."""
    return parse_keys(read_text(path), str(path))


def read_text(path: Path) -> str:
    try:
        if not path.is_file():
            raise KeyFileError(f"{path}: there is no such file")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror or error}") from None
    if len(data) > MOST_BYTES:
        raise KeyFileError(f"{path}: it has more than {MOST_BYTES >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise KeyFileError(f"{path}: line {line}: this is not UTF-8") from None


def parse_keys(text: str, name: str) -> list[Key]:
    """Reads the text of a file, which messages call by `name`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        last = text.count("\n") + 1
        raise KeyFileError(
            f"{name}: {error}".replace("at end of document", f"at line {last}, the last")
        ) from None
    except RecursionError:
        raise KeyFileError(f"{name}: it is nested too deeply") from None
    lines = _Lines(text, name)
    for field in document:
        if field != "keys":
            raise KeyFileError(
                lines.message(None, field, "a file of keys has tables [[keys]] and nothing else")
            )
    entries = document.get("keys", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise KeyFileError(lines.message(None, "keys", "write a table [[keys]] for each key"))
    keys = [_read_entry(entry, index, lines) for index, entry in enumerate(entries)]
    for field in ("name", "sha256"):
        known: dict[str, int] = {}
        for index, key in enumerate(keys):
            if (first := known.setdefault(getattr(key, field), index)) != index:
                text = f"the key at line {lines.header(first)} has the same"
                raise KeyFileError(lines.message(index, field, text))
    return keys


def _read_entry(entry: dict[str, Any], index: int, lines: _Lines) -> Key:
    if (expires := entry.get("expires")) is not None:
        try:
            entry = {**entry, "expires": moment_of(expires)}
        except ValueError as error:
            raise KeyFileError(lines.message(index, "expires", str(error))) from None
    try:
        return msgspec.convert(entry, Key)
    except msgspec.ValidationError as error:
        raise KeyFileError(lines.explain(index, error)) from None


def moment_of(value: object) -> datetime:
    """The moment that a date, or a time with an offset, stands for. A date is its beginning in UTC."""
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError("a time needs an offset, such as the Z of 2027-01-31T12:00:00Z")
        return value
    if isinstance(value, date):
        return datetime.combine(value, time_of_day(), UTC)
    raise ValueError("write a date, such as 2027-01-31, or a time with its offset, and no quotes around it")


class _Lines:
    """Finds the lines at which fields stand: the parser of TOML does not tell them."""

    def __init__(self, text: str, name: str) -> None:
        self._name = name
        self._lines = text.splitlines()
        self._headers = [number for number, line in enumerate(self._lines) if HEADER.fullmatch(line)]

    def header(self, index: int) -> int | str:
        return self._headers[index] + 1 if index < len(self._headers) else "?"

    def message(self, index: int | None, field: str, text: str) -> str:
        """The message on a field of the key of this index, or of the file itself."""
        start, stop = 0, len(self._lines)
        if index is not None:
            if index >= len(self._headers):  # the keys are written in another way than with headers
                return f"{self._name}: key number {index + 1}: {field}: {text}"
            start, stop = [*self._headers, stop][index : index + 2]
        field_at = re.compile(rf"""\s*\[?\[?["']?{re.escape(field)}["']?\s*[=.\]]""")
        found = [number for number in range(start, stop) if field_at.match(self._lines[number])]
        return f"{self._name}: line {(found or [start])[0] + 1}: {field}: {text}"

    def explain(self, index: int, error: msgspec.ValidationError) -> str:
        """The message on what msgspec has found wrong with the key of this index."""
        if unknown := _UNKNOWN.search(str(error)):
            of_model = (where := _WHERE.search(str(error))) is not None and where[1] == "models"
            fields = ", ".join((ModelQuotas if of_model else Key).__struct_fields__)
            text = f"there is no such field; there are {fields}"
            return self.message(index, "models" if of_model else unknown[1], text)
        if missing := _MISSING.search(str(error)):
            return self.message(index, missing[1], "the key has none")
        field, text = explain(error)
        return self.message(index, field or "keys", text)


def explain(error: msgspec.ValidationError) -> tuple[str, str]:
    """The field of a key that is wrong, and what is wrong with it."""
    text, where = str(error), _WHERE.search(str(error))
    field = where[1] if where else ""
    if "regex" in text:
        return field, _FORMS[field]
    return field, _WHERE.sub("", text).replace("`", "")


LOOK_SECONDS = 0.5
"""Seconds between looks at the file's state."""
QUIET_SECONDS = 1.0
"""Seconds for which a changed file must stay as it is before it is read: it may be half written."""

State = tuple[int, int, int]
"""What tells one state of a file from another without reading it."""

_log = logging.getLogger(__name__)


class FollowedKeyFile:
    """Tells all keys of a file whenever it has changed. While it is broken, those told last are valid."""

    def __init__(
        self,
        path: Path,
        on_keys: Callable[[Sequence[Key]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._on_keys = on_keys
        self._clock = clock
        self._read: State | None = None
        """The state in which the file was when it was last read, with or without success."""
        self._seen: State | None = None
        self._since = 0.0
        """When that state was seen first."""
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Have the file read soon, changed or not."""
        self._asked.set()

    async def follow(self) -> None:
        """Reads the file whenever that is asked for, or it has changed. It is parsed in a thread."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), LOOK_SECONDS)
            if self._asked.is_set() or self.has_changed():
                self._asked.clear()
                self.take(await asyncio.to_thread(self.read))

    def has_changed(self) -> bool:
        """Whether the file is another one than that which was read, and has been for a while."""
        state, now = _state_of(self._path), self._clock()
        if state != self._seen:
            self._seen, self._since = state, now
        return state != self._read and now - self._since >= QUIET_SECONDS

    def read(self) -> list[Key] | KeyFileError:
        """Reads the file, whatever its state is."""
        self._read = _state_of(self._path)
        try:
            return read_keys(self._path)
        except KeyFileError as error:
            return error

    def take(self, found: list[Key] | KeyFileError) -> None:
        """Tells what was read, all or nothing."""
        if isinstance(found, KeyFileError):
            _log.error("the file of keys cannot be used, and what was valid stays valid: %s", found)
            return
        self._on_keys(found)
        _log.info("%s: %d keys are valid now", self._path, len(found))


def _state_of(path: Path) -> State | None:
    """The state of a file now; None if it is not there, or must not be looked at."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
