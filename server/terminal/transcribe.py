"""`facet transcribe`: what is said in recordings, as text while it comes, as subtitles or as JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from server.options.option_table import OptionError
from server.terminal.console import ProgressBar, parser_of
from server.terminal.server_client import ServerClient, add_server_flags, client_of, model_of

_FORMATS = ("text", "srt", "vtt", "json", "verbose_json")
_SUFFIXES = {"text": ".txt", "json": ".json", "verbose_json": ".json"}


def run(arguments: Sequence[str], command: str) -> int:
    given = _parser(command).parse_args(arguments)
    files = [Path(name) for name in given.files]
    for file in files:
        if not file.is_file():
            raise OptionError(f"{file} is no file")
    if given.words and given.format != "verbose_json":
        raise OptionError("--words needs --format verbose_json")
    with client_of(given) as server:
        fields = _fields(given, model_of(server, given, "transcription"))
        bar = ProgressBar(len(files), "file")
        for file in files:
            _write(file, _transcribed(server, given, fields, file), given.beside, given.format)
            bar.add()
        bar.close()
    return 0


def _parser(command: str) -> argparse.ArgumentParser:
    parser = parser_of(command, "Write what is said in recordings, by a running server that transcribes.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="Recordings, or videos with sound.")
    parser.add_argument("--format", choices=_FORMATS, default="text", help="Default: text.")
    parser.add_argument("--language", metavar="NAME", help="A code or an English name. Default: it is found.")
    parser.add_argument("--translate", action="store_true", help="Write it in English.")
    parser.add_argument("--words", action="store_true", help="Times of words, in verbose_json.")
    parser.add_argument("--prompt", metavar="TEXT", help="Names and spellings that may come.")
    parser.add_argument(
        "--beside", action="store_true", help="Write files beside the recordings, a.srt for a.mp3."
    )
    add_server_flags(parser)
    return parser


def _fields(given: argparse.Namespace, model: str) -> dict[str, str]:
    fields = {"model": model, "response_format": given.format}
    optional = {"language": given.language, "prompt": given.prompt}
    fields |= {name: value for name, value in optional.items() if value is not None}
    return fields | ({"timestamp_granularities[]": "word"} if given.words else {})


def _transcribed(
    server: ServerClient, given: argparse.Namespace, fields: dict[str, str], file: Path
) -> Iterator[str]:
    """The answer; a text while it comes."""
    path = "/v1/audio/translations" if given.translate else "/v1/audio/transcriptions"
    if given.format != "text":
        yield server.send_form(path, fields, file).decode()
        return
    for event in server.stream_form(path, {**fields, "stream": "true"}, file):
        if event.get("type") == "transcript.text.delta":
            yield event["delta"]
    yield "\n"


def _write(file: Path, texts: Iterator[str], beside: bool, format: str) -> None:
    if not beside:
        for text in texts:
            sys.stdout.write(text)
            sys.stdout.flush()
        return
    written = file.with_suffix(_SUFFIXES.get(format, f".{format}"))
    part = written.with_name(written.name + ".part")
    part.write_text("".join(texts), "utf-8")
    part.replace(written)  # it has its name when it is whole
