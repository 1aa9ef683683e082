"""`facet prove`: whether this machine computes what the authors' code does, and what it computed before."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from models.checkpoint.hub import SHORT_NAMES
from server.terminal.console import CommandError, check_folder, columns, parser_of

if TYPE_CHECKING:
    from server.terminal.proving.checks import Check

FACTS = Path(__file__).parents[3] / "models" / "proofs"
"""Where answers of transformers are stored, in a file for each model."""


def run(arguments: Sequence[str], command: str) -> int:
    """Computes, compares and prints. The exit code is 1 if something differs."""
    parser = parser_of(
        command,
        "Compare what this machine computes with transformers' answers to the same prompts, and each "
        "operation with its reference. Models with known answers: "
        + ", ".join(known())
        + ". Of any model, --receipt keeps what it answers here, and --against compares another machine, "
        "version or number of threads with that.",
        "[MODEL...] [options]",
    )
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="Default: demo, and those that are installed."
    )
    parser.add_argument(
        "--receipt", metavar="FILE", help="Write what decides 200 answers, and their digests."
    )
    parser.add_argument("--against", metavar="FILE", help="Compare this machine with such a file.")
    parser.add_argument(
        "--dtype", default="auto", help="For receipts: the number type, as for `facet serve`."
    )
    parser.add_argument(
        "--cpu-threads", type=int, metavar="N", help="For receipts: the threads that compute."
    )
    parser.add_argument(
        *("--tensor-parallel-size", "-tp"),
        type=int,
        default=1,
        metavar="N",
        dest="ranks",
        help="For receipts: the ranks that share each layer.",
    )
    given = parser.parse_args(arguments)
    check_folder("--receipt", given.receipt)
    _check(given)

    from server.terminal.proving import checks  # which takes a while
    from worker.options import WorkerOptions

    options = WorkerOptions(dtype=given.dtype, cpu_threads=given.cpu_threads)
    if given.against is not None:
        model = given.models[0] if given.models else None
        return _show(list(checks.compare_with(Path(given.against), model, options, given.ranks)))
    if given.receipt is not None:
        checks.keep(Path(given.receipt), given.models[0] if given.models else "demo", options, given.ranks)
        return 0
    found: list[Check] = []
    for name in given.models or [name for name in known() if name == "demo" or checks.is_here(name)]:
        found += checks.prove(name, FACTS / f"{name}.json", with_operations=not found)
    return _show(found)


def _check(given: argparse.Namespace) -> None:
    """Raises CommandError for words that do not fit each other."""
    of_receipt = given.receipt is not None or given.against is not None
    if given.receipt is not None and given.against is not None:
        raise CommandError("--receipt writes a file, and --against reads one: give one of them")
    if not of_receipt and (given.dtype != "auto" or given.cpu_threads is not None or given.ranks != 1):
        raise CommandError("--dtype, --cpu-threads and -tp are for receipts: add --receipt or --against FILE")
    if given.ranks < 1:
        raise CommandError("-tp is 1 or more")
    if of_receipt and len(given.models) > 1:
        raise CommandError("a receipt is of one model: name one")
    if not of_receipt and (unknown := [name for name in given.models if name not in known()]):
        raise CommandError(
            f"there are no stored answers of {unknown[0]!r}, but of {', '.join(known())}; of any model, "
            "--receipt FILE keeps what it answers here"
        )


def known() -> list[str]:
    """The short names of models of which answers are stored."""
    return [name for name in SHORT_NAMES if (FACTS / f"{name}.json").is_file()]


def _show(checks: Sequence[Check]) -> int:
    rows = [("right" if check.is_right else "WRONG", check.name, check.found) for check in checks]
    print("\n".join(columns(rows)))
    return 0 if all(check.is_right for check in checks) else 1
