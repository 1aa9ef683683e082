"""The command `facet keys`: makes keys, lists them and removes them."""

from __future__ import annotations

import argparse
import hashlib
import secrets
import sys
from collections.abc import Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from server.access.keys.key import RIGHTS, Key, explain
from server.access.keys.key_file import KeyFileError, moment_of, read_keys
from server.access.keys.key_file_editing import change, with_key, without_key

BAD_USAGE = 2

_COLUMNS = ("name", "weight", "running", "queued", "requests/min", "tokens/min", "priority", "may", "expires")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise KeyFileError(message)


def run(arguments: Sequence[str], default_file: str | None) -> int:
    """Runs the command; `default_file` is the file of keys if the arguments name none."""
    try:
        options = vars(_parser().parse_args(arguments))
        file, command = options.pop("file") or default_file, options.pop("command")
        if file is None:
            raise KeyFileError("which file? give --file, or set the variable FACET_API_KEY_FILE")
        match command:
            case "add":
                _add(Path(file), options)
            case "remove":
                change(Path(file), lambda text: without_key(text, options["name"], file))
            case _:
                _list(read_keys(Path(file)))
    except KeyFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_USAGE
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="facet keys", description="Make, list and remove the keys of --api-key-file.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="add|list|remove")
    add = commands.add_parser("add", help="Make a key, show it once, and write its digest into the file.")
    add.add_argument("name", metavar="NAME")
    for name in ("max_running", "max_queued", "requests_per_minute", "tokens_per_minute", "priority"):
        add.add_argument(_flag(name), type=int, metavar="N")
    add.add_argument("--weight", type=float, metavar="X", help="Its part of the server; others have 1.")
    add.add_argument("--tasks", nargs="+", choices=RIGHTS, metavar="TASK", help=", ".join(RIGHTS))
    add.add_argument("--expires", type=_moment, metavar="DATE", help="Such as 2027-01-31.")
    add.add_argument("--admin", action="store_true", default=None)
    add.add_argument("--share-prefixes", action="store_true", default=None)
    remove = commands.add_parser("remove", help="Remove a key from the file.")
    remove.add_argument("name", metavar="NAME")
    for command in (add, remove, commands.add_parser("list", help="Show all keys but the keys themselves.")):
        command.add_argument("--file", metavar="FILE", help="Default: the variable FACET_API_KEY_FILE.")
    return parser


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _moment(text: str) -> datetime:
    try:
        return moment_of(
            date.fromisoformat(text) if len(text) == len("2027-01-31") else datetime.fromisoformat(text)
        )
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add(path: Path, options: dict[str, Any]) -> None:
    secret = "sk-" + secrets.token_urlsafe(32)
    given = {name: value for name, value in options.items() if value is not None}
    digest = hashlib.sha256(secret.encode()).hexdigest()
    try:
        key = msgspec.convert({**given, "sha256": digest}, Key)
    except msgspec.ValidationError as error:
        raise KeyFileError(": ".join(explain(error))) from None
    change(path, lambda text: with_key(text, key, str(path)))
    print("This is the only time that the key is shown:", file=sys.stderr)
    print(secret)


def _list(keys: Sequence[Key]) -> None:
    rows = [_COLUMNS, *(_row(key) for key in keys)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(key: Key) -> tuple[str, ...]:
    limits = (key.max_running, key.max_queued, key.requests_per_minute, key.tokens_per_minute)
    rights = ["everything"] if key.tasks is None else [*key.tasks]
    return (
        key.name,
        f"{key.weight:g}",
        *("-" if limit is None else str(limit) for limit in limits),
        str(key.priority),
        "+".join([*rights, *(["admin"] if key.admin else [])]) or "nothing",
        "-" if key.expires is None else key.expires.isoformat() + (" (over)" if key.has_expired() else ""),
    )
