"""The options of `facet bench serve`, in one table; their names are those of vLLM's benchmark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from server.options.option_parsing import (
    Option,
    OptionDoc,
    OptionError,
    VllmFlag,
    assemble,
    build_parser,
    canonical,
    options_of,
)
from server.terminal.console import CommandError, check_folder


class BenchError(CommandError):
    """A benchmark cannot run; the message is one line that says what was wrong and what to do."""

    exit_code = 2


_Number = TypeVar("_Number", int, float)

_SERVER, _LOAD, _REQUESTS = "Server", "Load", "Requests"
_RANDOM, _FILE, _RESULT = "Random texts", "Texts of a file", "Result"

ENDPOINTS = ("completions", "chat", "embeddings")
DATASETS = ("random", "custom")
_PERCENTILES = (50.0, 90.0, 99.0)
METRICS = ("ttft", "tpot", "itl", "e2el")

DEFAULT_PROMPTS = 100
"""The number of requests if neither a number nor a duration is given."""

_BACKENDS = {
    "vllm": "completions",
    "openai": "completions",
    "openai-chat": "chat",
    "openai-embeddings": "embeddings",
}
"""vLLM's words for the endpoints."""


def _endpoint(text: str) -> str:
    """Reads an endpoint's name from its name or its path."""
    name = text.strip("/").removeprefix("v1/")
    return "chat" if name == "chat/completions" else name


def _counts(text: str) -> tuple[int, ...]:
    return _numbers(text, int, "whole numbers, such as 1,8,32")


def _rates(text: str) -> tuple[float, ...]:
    return _numbers(text, float, "numbers, such as 0.5,2")


def _numbers(text: str, number: type[_Number], form: str) -> tuple[_Number, ...]:
    try:
        found = tuple(number(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or any(math.isnan(one) for one in found):
        raise ValueError(f"{text!r} is not made of {form}")
    return found


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    base_url: Annotated[str | None, OptionDoc(_SERVER)] = None
    """Address of the server, in place of host and port."""
    host: Annotated[str, OptionDoc(_SERVER)] = "127.0.0.1"
    """Host of the server."""
    port: Annotated[int, OptionDoc(_SERVER, least=1, most=65535)] = 8000
    """Port of the server."""
    model: Annotated[str | None, OptionDoc(_SERVER)] = None
    """Name of the model; default: the first that it lists."""
    api_key: Annotated[str | None, OptionDoc(_SERVER)] = None
    """Key to send with every request."""
    endpoint: Annotated[str | None, OptionDoc(_SERVER, ENDPOINTS, read=_endpoint)] = None
    """What to call; default: completions."""
    backend: Annotated[str | None, OptionDoc(_SERVER, tuple(_BACKENDS))] = None
    """vLLM's word for the endpoint."""

    max_concurrency: Annotated[
        tuple[int, ...] | None, OptionDoc(_LOAD, read=_counts, short="--concurrency")
    ] = None
    """Requests at once; each is followed by the next. Several, 1,8,32, are measured one after the other.
    Default: no bound."""
    request_rate: Annotated[tuple[float, ...], OptionDoc(_LOAD, read=_rates)] = (math.inf,)
    """Requests per second, whether or not earlier ones are done; inf is all at once. Several, 1,2,4, are
    measured one after the other."""
    burstiness: Annotated[float, OptionDoc(_LOAD, least=0.001)] = 1.0
    """How evenly they come: 1 is a Poisson process, less is burstier, more is evener."""
    num_prompts: Annotated[int | None, OptionDoc(_LOAD, least=1)] = None
    """Requests at each load; default: 100, or no bound with --duration."""
    duration: Annotated[float | None, OptionDoc(_LOAD, least=0.001)] = None
    """Seconds after which no more requests are sent."""
    num_warmups: Annotated[int, OptionDoc(_LOAD, least=0)] = 1
    """Requests that go before, and are not counted."""
    request_timeout: Annotated[float, OptionDoc(_LOAD, least=0.001)] = 600.0
    """Seconds after which a request has failed."""

    dataset_name: Annotated[str, OptionDoc(_REQUESTS, DATASETS)] = "random"
    """The source of the texts."""
    ignore_eos: Annotated[bool, OptionDoc(_REQUESTS)] = False
    """Let answers run to their full length."""
    temperature: Annotated[float | None, OptionDoc(_REQUESTS, least=0)] = None
    """Sampling temperature; default: the server's own."""
    extra_body: Annotated[dict[str, object], OptionDoc(_REQUESTS)] = {}
    """More fields for every request."""
    seed: Annotated[int, OptionDoc(_REQUESTS)] = 0
    """The seed of random texts and arrivals: the same gives the same."""

    random_input_len: Annotated[int, OptionDoc(_RANDOM, least=1, short="--input-len")] = 1024
    """Tokens of a text."""
    random_output_len: Annotated[int, OptionDoc(_RANDOM, least=1, short="--output-len")] = 128
    """Tokens of answers."""
    random_range_ratio: Annotated[float, OptionDoc(_RANDOM, least=0, most=0.999)] = 0.0
    """Lengths vary evenly by this share, up and down."""
    random_prefix_len: Annotated[int, OptionDoc(_RANDOM, least=0)] = 0
    """Tokens before them that all texts share."""
    random_batch_size: Annotated[int, OptionDoc(_RANDOM, least=1)] = 1
    """Texts in a request for embeddings."""
    random_vocab_size: Annotated[int, OptionDoc(_RANDOM, least=101)] = 1000
    """Texts are made of token ids from 100 up to this, which the model must have."""

    dataset_path: Annotated[str | None, OptionDoc(_FILE)] = None
    """JSON lines, each with prompt, messages or input, and max_tokens if it likes."""
    custom_output_len: Annotated[int | None, OptionDoc(_FILE, least=1)] = None
    """Tokens of an answer, whatever the file says; its own default is 128."""

    percentile_metrics: Annotated[tuple[str, ...] | None, OptionDoc(_RESULT, read=_words)] = None
    """What to show, of ttft,tpot,itl,e2el; default: all there is."""
    metric_percentiles: Annotated[tuple[float, ...], OptionDoc(_RESULT, read=_rates)] = _PERCENTILES
    """The percentiles to show."""
    output: Annotated[str | None, OptionDoc(_RESULT, short="--result-filename")] = None
    """File for the JSON result."""

    @property
    def url(self) -> str:
        return self.base_url or f"http://{self.host}:{self.port}"

    @property
    def kind(self) -> str:
        return self.endpoint or _BACKENDS.get(self.backend or "openai", "completions")

    @property
    def prompts(self) -> int | None:
        """None is no bound but the time."""
        return DEFAULT_PROMPTS if self.num_prompts is None and self.duration is None else self.num_prompts


OPTIONS = options_of(LoadOptions)

_HARMLESS_SWITCHES = ("--disable-tqdm", "--save-result", "--skip-tokenizer-init", "--trust-remote-code")
_UNSUPPORTED = ("--goodput", "--ramp-up-strategy", "--ramp-up-start-rps", "--ramp-up-end-rps", "--header")
VLLM_FLAGS = [
    *(VllmFlag(flag, is_switch=True, is_idle=True) for flag in _HARMLESS_SWITCHES),
    *(VllmFlag(flag, is_idle=True) for flag in ("--tokenizer", "--tokenizer-mode", "--label")),
    *(VllmFlag(flag) for flag in _UNSUPPORTED),
]
"""Flags of vLLM's benchmark that are not options here: they need no meaning, or have none yet."""


def parse(arguments: Sequence[str], command: str) -> LoadOptions:
    """Reads a command line. Raises OptionError with one line for the user; --help prints and exits."""
    options = assemble(LoadOptions, read_values(arguments, command, OPTIONS))
    check_load(options)
    return options


def read_values(arguments: Sequence[str], command: str, options: Sequence[Option]) -> dict[str, Any]:
    """Returns the values that a command line gives to these options, by their fields."""
    parser = build_parser(command, options, VLLM_FLAGS, "")
    parser.usage = f"{command} [options]"
    given = vars(parser.parse_args(canonical(arguments, parser)))
    for other in VLLM_FLAGS:
        if other.flag in given:
            other.check(given.pop(other.flag))
    return {o.field: o.value(given[o.field], o.flag) for o in options if o.field in given}


def write_result(path: str | None, result: object) -> None:
    """Write the result of a benchmark as JSON, if a file is named for it."""
    if path is not None:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")


def dataset_options(options: LoadOptions) -> dict[str, object]:
    """The options that say which texts were sent, for the result file."""
    group = {"random": _RANDOM, "custom": _FILE}[options.dataset_name]
    fields = [one.field for one in OPTIONS if one.doc.group == group and one.field != "dataset_path"]
    chosen = {field: getattr(options, field) for field in fields}
    return {"name": options.dataset_name, "seed": options.seed, **chosen}


def check_load(options: LoadOptions) -> None:
    """Raises OptionError if options do not go together."""
    if (options.dataset_name == "custom") != (options.dataset_path is not None):
        raise OptionError("--dataset-name custom and --dataset-path FILE go together; give both or none")
    check_folder("--output", options.output)
    if min(chain(options.max_concurrency or (1,), options.request_rate)) <= 0:
        raise OptionError("--max-concurrency and --request-rate must be greater than 0")
    if len(options.max_concurrency or ()) > 1 and len(options.request_rate) > 1:
        raise OptionError("--max-concurrency or --request-rate may name several loads, but not both")
    if options.prompts is None and options.max_concurrency is None and math.inf in options.request_rate:
        raise OptionError("--duration also needs --max-concurrency, --request-rate or --num-prompts")
    if unknown := set(options.percentile_metrics or ()) - set(METRICS):
        raise OptionError(f"--percentile-metrics: {unknown.pop()!r} is not one of {', '.join(METRICS)}")
    if not all(0 <= p <= 100 for p in options.metric_percentiles):
        raise OptionError("--metric-percentiles must lie from 0 to 100")
