"""`facet index-check`: which model, served in which way, has made the vectors of an index."""

from __future__ import annotations

import argparse
import base64
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from models.checkpoint.hub import resolve
from models.config import ConfigError, read_config
from models.pooling.config import read_pooling
from server.errors import ApiError
from server.options.option_table import OptionError
from server.options.server_options import parse
from server.requests.checkpoint_facts import open_tokenizer
from server.requests.index_check.given_vectors import MOST_SAMPLES, Given, read_given
from server.requests.index_check.pooled_vectors import Floats, read_poolings
from server.requests.index_check.report import Report, make_report, texts_to_send, written
from server.requests.index_check.search import Found, Model, search
from server.terminal.console import CommandError, ProgressBar, parser_of
from server.terminal.index_samples import choose, read_file
from server.terminal.index_stores import EXAMPLES, store_of
from server.terminal.own_server import own_server
from server.terminal.server_client import ServerClient, add_server_flags, client_of

_AT_ONCE = 16
"""Texts in a request."""
_LEFT_OUT = ("modules.json", "config_sentence_transformers.json")
"""Files that say how vectors are made: hidden states do not depend on them."""


def run(arguments: Sequence[str], command: str) -> int:
    """Returns 1 if none of the models made the vectors."""
    given, serve_options = _parser(command).parse_known_args(arguments)
    if serve_options and not given.models:
        raise OptionError(f"{serve_options[0]}: options of serve go with --model")
    if not 4 <= given.samples <= MOST_SAMPLES:
        raise OptionError(f"--samples {given.samples} should be between 4 and {MOST_SAMPLES}")
    samples = choose(_read(given), given.samples)
    try:
        vectors = read_given([text for text, _ in samples], [vector for _, vector in samples])
        if given.models:
            reports = [_checked(name, vectors, given, serve_options) for name in given.models]
        else:
            reports = [_asked(vectors, given)]
    except (ApiError, ConfigError) as error:
        raise CommandError(str(error)) from None
    if given.json:
        print(msgspec.json.encode(reports).decode())
    else:
        print(written(reports))
    return 0 if any(report.matches for report in reports) else 1


def _read(given: argparse.Namespace) -> list[tuple[str, object]]:
    if (reader := store_of(given.index)) is None:
        texts = None if given.texts is None else Path(given.texts)
        return read_file(Path(given.index), texts, given.text_field, given.vector_field)
    try:
        return reader(given.index, given.text_field, given.vector_field)
    except OptionError:
        raise
    except Exception as error:  # each client has its own kinds
        raise CommandError(f"{given.index.partition(':')[0]}: {type(error).__name__}: {error}") from None


def _asked(vectors: Given, given: argparse.Namespace) -> Report:
    """The report of a server that runs."""
    samples = [
        {"text": text, "vector": base64.b64encode(row.astype("<f4").tobytes()).decode()}
        for text, row in zip(vectors.texts, vectors.rows, strict=True)
    ]
    with client_of(given) as server:
        answer = server.post("/index_check", {"samples": samples, "prompts": given.prompts})
    return msgspec.convert(answer, Report)


def _checked(name: str, vectors: Given, given: argparse.Namespace, options: Sequence[str]) -> Report:
    """The report on a checkpoint, for which a server is started; and another one, as the report says."""
    folder = resolve(name, None, None, lambda _: None, "auto")
    config = read_config(folder)
    pooling = read_pooling(folder, config, {})
    poolings = read_poolings(folder, pooling)
    tokenizer = open_tokenizer(parse([str(folder)], {}), folder)
    states = ["--runner", "pooling", "--tasks", "embed,token_embed", *options]
    with _plain_view(folder) as view, own_server([str(view), *states]) as own:
        own.wait_until_ready()
        with ServerClient(own.url) as server:
            [card] = server.get("/v1/models")["data"][:1]
            mode = _part(card["embedding_space"], "pooling").upper()
            model = Model(
                name, tokenizer, pooling, poolings, card["max_model_len"], tuple(given.prompts), mode
            )
            found = _searched(model, vectors, server)
    report = make_report(found)
    if report.serve and not report.lacks:
        report.served = _served(report, found, options)
    return report


def _searched(model: Model, vectors: Given, server: ServerClient) -> Found:
    running, bar = search(model, vectors), ProgressBar(0, "text")
    try:
        ids = next(running)
        while True:
            ids = running.send(_states(ids, server))
            bar.add(len(ids))
    except StopIteration as end:
        return end.value
    finally:
        bar.close()


def _states(ids: Sequence[list[int]], server: ServerClient) -> list[Floats]:
    """The hidden states of texts [L, H] each."""
    fields = {"task": "token_embed", "use_activation": False, "encoding_format": "base64"}
    found: list[Floats] = []
    for start in range(0, len(ids), _AT_ONCE):
        some = ids[start : start + _AT_ONCE]
        answer = server.post("/pooling", {**fields, "input": some})["data"]
        rows = [np.frombuffer(base64.b64decode(one["data"]), "<f4") for one in answer]
        found += [row.reshape(len(tokens), -1) for row, tokens in zip(rows, some, strict=True)]
    return found


def _served(report: Report, found: Found, options: Sequence[str]) -> float:
    """How near the vectors are that a server makes which is started as the report says."""
    with own_server([*report.serve[1:], *options]) as own:
        own.wait_until_ready()
        with ServerClient(own.url) as server:
            fields: dict[str, Any] = {"encoding_format": "base64", **report.request}
            answer = server.post("/v1/embeddings", {**fields, "input": texts_to_send(found)})["data"]
    made = np.stack([np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in answer])
    return float(np.median(found.given.nearness(made, range(len(made)))))


@contextmanager
def _plain_view(folder: Path) -> Iterator[Path]:
    """A folder with links to the files of a checkpoint, but for those that say how vectors are made."""
    if not (folder / "config.json").is_file():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="facet-") as name:
        for path in folder.iterdir():
            limits = path.name.startswith("sentence_") and path.suffix == ".json"
            if path.name not in _LEFT_OUT and not limits:
                (Path(name) / path.name).symlink_to(path.resolve())
        yield Path(name)


def _part(space: str, name: str) -> str:
    return next(part.partition("-")[2] for part in space.split(".") if part.startswith(f"{name}-"))


def _parser(command: str) -> argparse.ArgumentParser:
    parser = parser_of(
        command,
        "Find which model, served in which way, has made the vectors of an index.",
        "FILE|URL [--model MODEL ...] [options] [options of serve]",
    )
    parser.add_argument(
        "index",
        metavar="FILE|URL",
        help=f"JSON lines, .parquet, .npy with --texts; or {', '.join(EXAMPLES)}.",
    )
    parser.add_argument(
        "--model",
        dest="models",
        action="append",
        default=[],
        metavar="MODEL",
        help="A checkpoint that may have made them; may be repeated. Default: ask the server at --url.",
    )
    add_server_flags(parser, model=False)
    parser.add_argument("--texts", metavar="FILE", help="The texts of a .npy file, one in each line.")
    parser.add_argument("--text-field", metavar="NAME", help="The field of the text, such as payload.text.")
    parser.add_argument("--vector-field", metavar="NAME", help="The field of the vector.")
    parser.add_argument(
        "--prompt",
        dest="prompts",
        action="append",
        default=[],
        metavar="TEXT",
        help="An instruction that may stand before the texts, beside the model's own and usual ones.",
    )
    parser.add_argument("--samples", type=int, default=32, metavar="N", help="Samples to look at (32).")
    parser.add_argument("--json", action="store_true", help="Print the reports as JSON.")
    return parser
