"""The command `facet keys`: makes keys, lists them and removes them."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date, datetime
from pathlib import Path
from typing import Any

import msgspec

from server.access import key_file
from server.model_facts import RIGHTS
from server.options.option_parsing import OptionError, Parser, flag_of
from server.options.parse_server_options import key_file_of_environment
from server.terminal.console import columns

_ONLY_OWNER = 0o600

_COLUMNS = ("name", "weight", "running", "queued", "requests/min", "tokens/min", "priority", "may", "expires")


def run(arguments: Sequence[str], command: str) -> int:
    options = vars(_parser(command).parse_args(arguments))
    file, action = options.pop("file") or key_file_of_environment(), options.pop("command")
    if file is None:
        raise OptionError(
            "facet keys needs the file of keys: give --file, or set the variable FACET_API_KEY_FILE"
        )
    match action:
        case "add":
            _add(Path(file), options)
        case "remove":
            change(Path(file), lambda text: without_key(text, options["name"], file))
        case _:
            print("\n".join(columns([_COLUMNS, *map(_row, key_file.read_keys(Path(file)))])))
    return 0


_LIMITS = {
    "max_running": "Maximum number of its requests that run at once.",
    "max_queued": "Maximum number of its requests that wait.",
    "requests_per_minute": "Maximum number of its requests in a minute.",
    "tokens_per_minute": "Maximum number of its tokens in a minute, prompts and answers together.",
    "priority": "Priority of its requests, and the lowest number they may ask for: lower ones come first.",
}
"""What the options with a number say, by the names of the fields in the file."""


def _parser(command: str) -> argparse.ArgumentParser:
    parser = Parser(prog=command, description="Create, list and remove the keys of --api-key-file.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="add|list|remove")
    add = commands.add_parser("add", help="Create a key, show it once, and write its digest to the file.")
    add.add_argument("name", metavar="NAME")
    for name, about in _LIMITS.items():
        add.add_argument(flag_of(name), type=int, metavar="N", help=about)
    add.add_argument("--weight", type=float, metavar="X", help="Its share of the server; others have 1.")
    add.add_argument(
        "--tasks",
        nargs="+",
        choices=RIGHTS,
        metavar="TASK",
        help=f"The tasks it may use: {', '.join(RIGHTS)}.",
    )
    add.add_argument("--models", nargs="+", metavar="NAME", help="The models it may use; default: all.")
    add.add_argument("--expires", type=_moment, metavar="DATE", help="When it expires, such as 2027-01-31.")
    add.add_argument("--admin", action="store_true", default=None, help="Allow metrics and administration.")
    about = "Share cached prefixes with the other keys that have this."
    add.add_argument("--share-prefixes", action="store_true", default=None, help=about)
    remove = commands.add_parser("remove", help="Remove a key from the file.")
    remove.add_argument("name", metavar="NAME")
    for action in (add, remove, commands.add_parser("list", help="List the names and limits of all keys.")):
        action.add_argument("--file", metavar="FILE", help="Default: the variable FACET_API_KEY_FILE.")
    return parser


def _moment(text: str) -> datetime:
    try:
        return key_file.moment_of(
            date.fromisoformat(text) if len(text) == len("2027-01-31") else datetime.fromisoformat(text)
        )
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a date such as 2027-01-31") from None


def _add(path: Path, options: dict[str, Any]) -> None:
    secret = "sk-" + secrets.token_urlsafe(32)
    given = {name: value for name, value in options.items() if value is not None}
    digest = hashlib.sha256(secret.encode()).hexdigest()
    try:
        key = msgspec.convert({**given, "sha256": digest}, key_file.Key)
    except msgspec.ValidationError as error:
        raise key_file.KeyFileError(": ".join(key_file.explain(error))) from None
    change(path, lambda text: with_key(text, key, str(path)))
    print("This is the only time that the key is shown:", file=sys.stderr)
    print(secret)


def _row(key: key_file.Key) -> tuple[str, ...]:
    limits = (key.max_running, key.max_queued, key.requests_per_minute, key.tokens_per_minute)
    rights = ["everything"] if key.tasks is None else [*key.tasks]
    return (
        key.name,
        f"{key.weight:g}",
        *("-" if limit is None else str(limit) for limit in limits),
        str(key.priority),
        ("+".join([*rights, *(["admin"] if key.admin else [])]) or "nothing")
        + ("" if key.models is None else f" of {'+'.join(key.models) or 'no model'}"),
        "-" if key.expires is None else key.expires.isoformat() + (" (over)" if key.has_expired() else ""),
    )


# The file, in which everything is left alone that is not to be changed.


def with_key(text: str, key: key_file.Key, name: str) -> str:
    """The text of a file with one more key. Messages call the file by `name`."""
    known = key_file.parse_keys(text, name)
    if any(one.name == key.name for one in known):
        raise key_file.KeyFileError(
            f"{name}: there is a key of the name {key.name} already: remove it first, or choose another"
        )
    lines = ["[[keys]]"]
    for field in msgspec.structs.fields(key_file.Key):
        value = getattr(key, field.name)
        if field.required or value != field.default:
            lines.append(f"{field.name} = {_as_toml(value)}")
    before = text if not text or text.endswith("\n") else text + "\n"
    return before + ("\n" if before else "") + "\n".join(lines) + "\n"


def without_key(text: str, key_name: str, name: str) -> str:
    """The text of a file without the key of this name. Messages call the file by `name`."""
    known = key_file.parse_keys(text, name)
    found = [index for index, one in enumerate(known) if one.name == key_name]
    if not found:
        raise key_file.KeyFileError(f"{name}: there is no key of the name {key_name}")
    lines = text.splitlines(keepends=True)
    headers = [number for number, line in enumerate(lines) if key_file.HEADER.fullmatch(line.rstrip("\r\n"))]
    if len(headers) != len(known):
        raise key_file.KeyFileError(
            f"{name}: it is written in another way than with lines [[keys]]: change it by hand"
        )
    start, stop = [*headers, len(lines)][found[0] : found[0] + 2]
    while stop < len(lines) and stop - 1 > start and _is_remark(lines[stop - 1]):
        stop -= 1  # remarks before the next key are on that one
    return "".join(lines[:start] + lines[stop:])


def _is_remark(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _as_toml(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    # Strings, numbers, booleans and lists of strings are the same in both, but for pairs of surrogates.
    return json.dumps(value, ensure_ascii=False)


def change(path: Path, changed: Callable[[str], str]) -> None:
    """Replace the text of a file by a function of it, at once and not beside another change."""
    path = Path(os.path.realpath(path))
    try:
        with _alone(path.parent):
            text = changed(key_file.read_text(path) if path.exists() else "")
            key_file.parse_keys(text, str(path))
            _replace(path, text)
    except OSError as error:
        why = error.strerror or error
        raise key_file.KeyFileError(f"the file of keys {path} cannot be changed: {why}") from None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until nobody else changes files of this folder in this way."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    """Put a new file in a file's place, so that whoever reads it meanwhile has the old or the new one."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            if path.exists():
                old = path.stat()
                os.fchmod(file.fileno(), old.st_mode & 0o777)
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
            else:
                os.fchmod(file.fileno(), _ONLY_OWNER)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
