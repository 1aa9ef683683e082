"""`facet pull` and `facet list`: models in the hub's cache on this machine, and those that a server has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from models.checkpoint.hub import HubError, resolve
from server.terminal.console import CommandError, columns, gigabytes, parser_of, safe_text
from server.terminal.progress_bar import ProgressDisplay
from server.terminal.server_client import Unreachable, add_server_flags, client_of


class Interrupted(CommandError):
    """The user has pressed Ctrl-C; the text says what is left."""

    exit_code = 130


def run(arguments: Sequence[str], command: str) -> int:
    """Runs `facet pull` or `facet list`: that is the command's last word."""
    return (_pull if command.endswith("pull") else _list)(arguments, command)


def _pull(arguments: Sequence[str], command: str) -> int:
    """Downloads a model into the cache, and says where it lies."""
    parser = parser_of(
        command,
        "Download what serving a model needs, but for what is there already, which may be parts of files.",
        "MODEL [options]",
    )
    parser.add_argument("model", metavar="MODEL", help="Hub id, of a GGUF file owner/name:Q4_K_M; or demo.")
    parser.add_argument(
        "--quant", metavar="NAME", help="Of several GGUF files, the one with this in its name."
    )
    parser.add_argument("--revision", metavar="NAME", help="Branch, tag or commit on the hub.")
    parser.add_argument("--load-format", default="auto", metavar="NAME", help="As for `facet serve`.")
    parser.add_argument("--download-dir", metavar="DIR", help="Default: the hub's cache.")
    given = parser.parse_args(arguments)
    display = ProgressDisplay()
    try:
        place = resolve(
            given.model,
            given.revision,
            given.download_dir,
            lambda fraction: display.show("download", fraction),
            given.load_format,
            given.quant,
        )
    except HubError as error:
        raise CommandError(str(error)) from None
    except KeyboardInterrupt:
        raise Interrupted("stopped: the same command goes on where this one was") from None
    finally:
        display.done()
    print(f"{given.model}: {gigabytes(_size(place))} in {place}")
    return 0


def _size(place: Path) -> int:
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def _list(arguments: Sequence[str], command: str) -> int:
    """Lists the models of the cache, and those of a server if one runs."""
    parser = parser_of(command, "List the models that were downloaded, and what a running server has.")
    parser.add_argument("--download-dir", metavar="DIR", help="Default: the hub's cache.")
    add_server_flags(parser, model=False)
    given = parser.parse_args(arguments)
    print("\n".join(map(safe_text, _cached(given.download_dir))))
    try:
        with client_of(given) as server:
            cards = server.get("/v1/models")["data"]
    except Unreachable:
        print(f"no server runs at {given.url}")
    else:
        shown = (f"{card['id']} ({card['state']})" if "state" in card else card["id"] for card in cards)
        print(safe_text(f"served at {given.url}: {', '.join(shown)}"))
    return 0


def _cached(folder: str | None) -> list[str]:
    """The lines about the models in a cache, the last used first."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    folder = folder or constants.HF_HUB_CACHE
    try:
        repositories = [one for one in scan_cache_dir(folder).repos if one.repo_type == "model"]
    except CacheNotFound:
        repositories = []
    if not repositories:
        return [f"no model lies in {folder}: `facet pull MODEL` downloads one"]
    rows = [("downloaded", "size", "last used")]
    for one in sorted(repositories, key=lambda one: one.last_accessed, reverse=True):
        is_partial = any((one.repo_path / "blobs").glob("*.incomplete"))
        day = datetime.fromtimestamp(one.last_accessed, UTC).date().isoformat()
        rows.append((one.repo_id, gigabytes(one.size_on_disk) + (" (in part)" if is_partial else ""), day))
    return [*columns(rows), f"in {os.fspath(folder)}"]
