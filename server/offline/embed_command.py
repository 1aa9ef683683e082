"""`facet embed`: vectors of texts, computed in this process or by a server: a line of JSON for each text.

It lies beside `LLM`, which the rooms below may not import; with --url neither `LLM` nor torch is imported.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import cast

import msgspec

from server.errors import ApiError
from server.options.option_parsing import OptionError, canonical
from server.options.parse_server_options import Given, read
from server.terminal.console import CommandError, check_folder, parser_of
from server.terminal.progress_bar import ProgressDisplay, StatusLine
from server.terminal.server_client import add_server_flags, client_of, model_of
from worker.host.garbage import without_looking_for_garbage
from worker.logs import one_line

Rows = list[list[float]]
Embed = Callable[[list[str]], Rows]

TEXTS_AT_ONCE = 256
"""Texts of one request, whose vectors are written before the next texts are read."""
_BLOCK = 1 << 16


def run(arguments: Sequence[str], command: str) -> int:
    """Writes the vectors of all texts, in their order."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = _parser(command)
    given, rest = parser.parse_known_args(arguments[:at])
    options = None if given.url is not None else read(rest, command=command)
    words = _words(rest, parser, command) if options is None else options.tags
    words = [*words, *arguments[at + 1 :]]
    if options is not None and given.model is None:
        if not words:
            raise OptionError("name a model, `facet embed MODEL TEXT`, or a server with --url")
        given.model, *words = words
    _check_output(given)
    texts = _texts(given, words)
    write = _write_array if (given.output or "").endswith(".npy") else _write_lines
    with _server(given) if options is None else _model(given, options) as embed:
        write(given.output, _rows(embed, texts))
    return 0


def _words(rest: Sequence[str], parser: argparse.ArgumentParser, command: str) -> Sequence[str]:
    """The words beside --url. Raises OptionError if there is an option that a server has for itself."""
    try:
        return canonical(rest, parser)
    except OptionError as unknown:
        try:
            read(rest, command=command)
        except OptionError:
            raise unknown from None  # `serve` has no such option either
        flag = next(word for word in rest if word.startswith("-"))
        raise OptionError(f"{flag}: with --url another server answers, which has its own options") from None


def _parser(command: str) -> argparse.ArgumentParser:
    parser = parser_of(
        command,
        "Print the vector of each text: a JSON array in a line of its own, in the order of the texts. This "
        "process computes them, with the options of `facet serve` for the model; with --url, a server that "
        "runs does. Words behind -- are texts, whatever they begin with.",
        "MODEL [TEXT...] [options, also of serve] | --url URL [TEXT...] [options]",
    )
    about = "Texts, one in each line; - is standard input, the default in a pipe. Empty lines are refused."
    parser.add_argument("-i", "--input-file", dest="input", metavar="FILE", help=about)
    about = "Texts of the input end with NUL characters, so that they may have several lines."
    parser.add_argument("-z", "--null", action="store_true", help=about)
    about = "The output; with .npy at its end it is a float32 array of NumPy, [texts, dimensions]."
    parser.add_argument("-o", "--output-file", dest="output", metavar="FILE", help=about)
    about = "Numbers to keep of each vector (Matryoshka)."
    parser.add_argument("--dimensions", type=int, metavar="N", help=about)
    about = "The model's prompt that is written before each text, such as query."
    parser.add_argument("--prompt-name", metavar="NAME", help=about)
    about = "Cut texts to N tokens; -1: to what the model reads. Without it, longer texts are refused."
    parser.add_argument("--truncate-prompt-tokens", type=int, metavar="N", help=about)
    add_server_flags(parser, default=None)
    return parser


def _check_output(given: argparse.Namespace) -> None:
    check_folder("-o", given.output)
    files = [Path(path).resolve() for path in (given.input, given.output) if path not in (None, "-")]
    if len(files) > len(set(files)):
        raise OptionError("-i and -o name the same file")


# The texts.


def _texts(given: argparse.Namespace, words: Sequence[str]) -> Iterator[str]:
    """Yields the texts as they are read, the first of which is read at once. Raises OptionError."""
    if words and given.input is not None:
        raise OptionError("texts are given as words and with -i: leave out one of them")
    if not words and given.input is None and sys.stdin.isatty():
        raise OptionError("give texts: as words, with -i FILE, or through a pipe")
    path = "-" if given.input is None else given.input
    source = "standard input" if path == "-" else f"-i {path}"
    if words:
        texts = _decoded(map(os.fsencode, words), "text")
    elif given.null:
        texts = _decoded(_pieces(path, b"\0"), f"{source}, text")
    else:
        lines = (line.removesuffix(b"\r") for line in _pieces(path, b"\n"))
        texts = _decoded(lines, f"{source}, line")
    try:
        first = next(texts, None)
    except OSError as error:
        raise OptionError(f"{source} cannot be read: {error.strerror}") from None
    if first is None:
        raise OptionError(f"{source} is empty: give texts")
    return chain([first], texts)


def _pieces(path: str, end: bytes) -> Iterator[bytes]:
    """Yields what stands before each `end` of a file, and behind the last one if there is something."""
    rest = b""
    with nullcontext(cast("BufferedReader", sys.stdin.buffer)) if path == "-" else open(path, "rb") as file:
        while block := file.read1(_BLOCK):
            *whole, rest = (rest + block).split(end)
            yield from whole
    if rest:
        yield rest


def _decoded(pieces: Iterable[bytes], where: str) -> Iterator[str]:
    """Yields the pieces as texts. Raises OptionError with the number of one that is none, or is empty."""
    for number, piece in enumerate(pieces, 1):
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            raise OptionError(f"{where} {number} is not text in UTF-8") from None
        if not text.strip():
            raise OptionError(f"{where} {number} is empty, and has no vector: leave it out")
        yield text


# The vectors.


@contextmanager
def _server(given: argparse.Namespace) -> Iterator[Embed]:
    """Yields what asks the server at --url. Raises ServerError."""
    asked = ("dimensions", "prompt_name", "truncate_prompt_tokens")
    body = {name: getattr(given, name) for name in asked if getattr(given, name) is not None}
    with client_of(given) as server:
        body["model"] = model_of(server, given, "embed")

        def embed(texts: list[str]) -> Rows:
            answer = server.post("/v1/embeddings", {**body, "input": texts})
            return [each["embedding"] for each in answer["data"]]

        yield embed


@contextmanager
def _model(given: argparse.Namespace, options: Given) -> Iterator[Embed]:
    """Loads the model, and yields what computes with it. Raises CommandError."""
    values = {"runner": "pooling", **options.values}
    config = options._replace(tags=[given.model], values=values).config()
    with without_looking_for_garbage():
        from server.offline.llm import LLM
        from server.requests.pooling import QUERIES, PoolingParams
    params = PoolingParams(dimensions=given.dimensions, query=given.prompt_name in QUERIES)
    with _refused():
        llm = LLM(config, display=ProgressDisplay(silent=not sys.stderr.isatty()))
    with llm:
        if "embed" not in llm.facts.tasks:
            raise CommandError(f"{given.model} cannot embed; it can {', '.join(llm.facts.tasks)}")

        def embed(texts: list[str]) -> Rows:
            with _refused():
                outputs = llm.embed(
                    texts,
                    pooling_params=params,
                    prompt_name=given.prompt_name,
                    truncate_prompt_tokens=given.truncate_prompt_tokens,
                    use_tqdm=False,
                )
            return [one.outputs.embedding for one in outputs]

        try:
            yield embed
        finally:
            gc.freeze()  # the process ends now, for which Python looks for garbage in all that was imported


@contextmanager
def _refused() -> Iterator[None]:
    """Has errors of the model and of texts end the command with one line."""
    try:
        yield
    except (ApiError, ValueError, OSError) as error:
        raise CommandError(error.message if isinstance(error, ApiError) else one_line(error)) from None


def _rows(embed: Embed, texts: Iterator[str]) -> Iterator[Rows]:
    """Yields the vectors of TEXTS_AT_ONCE texts at a time. On a terminal, a line tells how many there are."""
    status, done = StatusLine(), 0
    while batch := list(islice(texts, TEXTS_AT_ONCE)):
        if done:
            status.draw(lambda seconds, count=done: f"{count} texts, {count / seconds:.0f}/s")
        try:
            rows = embed(batch)
        except CommandError as error:
            if done == 0:
                raise
            raise CommandError(f"of the texts from {done + 1} to {done + len(batch)}: {error}") from None
        done += len(batch)
        status.clear()
        yield rows


def _write_lines(path: str | None, rows: Iterable[Rows]) -> None:
    with nullcontext(sys.stdout) if path in (None, "-") else open(path, "w") as file:
        for vectors in rows:
            file.writelines(msgspec.json.encode(one).decode() + "\n" for one in vectors)
            file.flush()


def _write_array(path: str, rows: Iterable[Rows]) -> None:
    import numpy as np  # which lines do without

    np.save(path, np.concatenate([np.array(vectors, np.float32) for vectors in rows]))
