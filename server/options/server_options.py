"""Reads and checks the options of a server, from the command line, variables, a file and keywords: the only
reader of the environment but for what the system says there (`worker.host.machine`).
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import msgspec

from engine_core.config import WORKERS, EngineConfig, check_cluster_key, cluster_key_needed
from server.options.media_io import read_media_io
from server.options.option_table import (
    Option,
    OptionError,
    VllmFlag,
    assemble,
    build_parser,
    canonical,
    from_environment,
    from_file,
    from_keywords,
    json_object,
    options_of,
)
from server.options.server_config import (
    ACCESS,
    ANSWERS,
    HTTP,
    LOGS,
    MEDIA,
    REPORTS,
    TEXT,
    ServerConfig,
)
from server.options.vllm_flags import VLLM_FLAGS
from worker.options import MEMORY, MODEL, SCHEDULER, Doc


def check(config: ServerConfig) -> None:
    """Raises OptionError if options contradict each other, or cannot do what they are meant for."""
    if "*" in config.allowed_origins and config.allow_credentials:
        raise OptionError(
            "--allow-credentials with --allowed-origins * would let every website act as your users; "
            "name the origins"
        )
    if bool(config.ssl_keyfile) != bool(config.ssl_certfile):
        raise OptionError("--ssl-keyfile and --ssl-certfile go together; give both or none")
    if config.ssl_ca_certs and not config.ssl_certfile:
        raise OptionError(
            "--ssl-ca-certs asks clients for certificates, which plain HTTP cannot: "
            "give --ssl-certfile and --ssl-keyfile too"
        )
    if not config.host:
        raise OptionError("--host: an empty address would be all of them; write 0.0.0.0 if you mean that")
    if "" in config.access.api_key:
        raise OptionError("--api-key: an empty key protects nothing; leave it out or give one")
    check_traces(config.reports.otlp_traces_endpoint)
    try:
        config.media.most_of(())
        _ = config.media.most_frames
    except ValueError as error:
        raise OptionError(str(error)) from error
    try:
        read_media_io(config.media.media_io_kwargs)
    except ValueError as error:
        raise OptionError(f"--media-io-kwargs: {error}") from error
    _check_nodes(config)
    _check_replicas(config)


def check_traces(endpoint: str | None) -> None:
    """Raises OptionError if spans cannot be sent to where they shall be."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise OptionError(
            f"--otlp-traces-endpoint: {endpoint!r} is no http or https URL; spans are sent by OTLP over "
            "HTTP, whose port is 4318, not 4317, that of gRPC"
        )
    if find_spec("opentelemetry.exporter") is None or find_spec("opentelemetry.sdk") is None:
        raise OptionError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'facet-serve[otel]'")


def _check_nodes(config: ServerConfig) -> None:
    """Check the options that spread one model over several machines."""
    engine, headless = config.engine, config.headless
    nodes, rank = engine.nnodes, engine.node_rank
    if rank >= nodes:
        raise OptionError(f"--node-rank {rank}: of --nnodes {nodes} the last is {nodes - 1}")
    if rank and not headless:
        raise OptionError(f"--node-rank {rank} goes with --headless: the API is on the machine of rank 0")
    if nodes == 1:
        return
    if headless and not rank:
        raise OptionError("--headless with --nnodes is for --node-rank 1 and up: rank 0 has the API")
    if config.data_parallel_size > 1:
        raise OptionError(
            "--nnodes spreads one replica over machines, and --data-parallel-size adds replicas: use one of "
            "them; several spread replicas are several servers behind a load balancer"
        )
    _check_key(engine, f"--nnodes {nodes}")
    if _is_public(engine.master_addr) and not config.insecure:
        raise OptionError(
            f"--master-addr {engine.master_addr} is a public address, and what ranks exchange is not "
            "encrypted: give an address of a private network, such as WireGuard's, or --insecure if "
            "strangers cannot reach this one"
        )


def _check_replicas(config: ServerConfig) -> None:
    """Check the options that put replicas on several machines, or let them share experts."""
    # after `serve` has checked whose `models` this is
    from engine_core.expert_options import balancing_of, check_halves
    from engine_core.guess_options import read_guess_options

    engine, replicas, headless = config.engine, config.replicas, config.headless
    size = replicas.size
    try:
        check_halves(engine, size if engine.enable_expert_parallel else 1)
        balancing_of(engine)
        read_guess_options(engine)
    except ValueError as error:
        raise OptionError(str(error)) from error
    if engine.enable_expert_parallel and size > 1 and (headless or replicas.elsewhere):
        raise OptionError(
            f"--enable-expert-parallel with --data-parallel-size {size} shares experts among replicas, all "
            "on one machine for now: leave out --headless and --data-parallel-size-local, or the sharing"
        )
    if replicas.first and not headless:
        raise OptionError("--data-parallel-start-rank goes with --headless: the API's machine has the first")
    if replicas.here < 0 or replicas.first + replicas.here > size:
        raise OptionError(
            f"--data-parallel-size {size} has the replicas 0 to {size - 1}: there are none for "
            f"--data-parallel-start-rank {replicas.first} and --data-parallel-size-local {replicas.here}"
        )
    if headless and engine.nnodes == 1:
        if not replicas.here:
            raise OptionError(
                "--headless with --data-parallel-size-local 0 has nothing to run; give 1 or more"
            )
        _check_key(engine, "--headless, which runs replicas for another machine's API,")
    elif replicas.elsewhere:
        _check_key(engine, f"--data-parallel-size-local {replicas.here}, which lets other machines join,")


def _check_key(engine: EngineConfig, what: str) -> None:
    if engine.cluster_key is None:
        raise OptionError(str(cluster_key_needed(what)))
    try:
        check_cluster_key(engine.cluster_key)
    except ValueError as error:
        raise OptionError(f"--cluster-key: {error}") from error


def _is_public(address: str) -> bool:
    """Whether strangers may be able to reach it. Of a name nobody can tell before it is looked up."""
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address that is listened to."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


PREFIX = "FACET_"


class _Shorthands(msgspec.Struct, frozen=True):
    """Options that stand for others."""

    async_scheduling: Annotated[bool | None, Doc(SCHEDULER)] = None
    """Plan a step while another runs; the same as --steps-ahead 1, or 0."""
    spec_method: Annotated[str | None, Doc(SCHEDULER)] = None
    """method of --speculative-config: ngram or suffix."""
    spec_model: Annotated[str | None, Doc(SCHEDULER)] = None
    """model of --speculative-config."""
    spec_tokens: Annotated[int | None, Doc(SCHEDULER)] = None
    """num_speculative_tokens of --speculative-config."""


_GUESSES = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
"""Shorthands and the fields of --speculative-config that they give."""


_GROUPS = (MODEL, MEMORY, WORKERS, SCHEDULER, TEXT, MEDIA, ANSWERS, HTTP, REPORTS, ACCESS, LOGS)

OPTIONS: list[Option] = sorted(
    [*options_of(ServerConfig), *options_of(_Shorthands)], key=lambda option: _GROUPS.index(option.doc.group)
)
"""Every option, for the parsers below and for the reference page."""


_EPILOG = (
    f"Every option can also be set by a variable, {PREFIX}MAX_MODEL_LEN for --max-model-len, or in the file "
    "of --config; the command line wins over variables, and those over the file."
)


def parse(
    arguments: Sequence[str], environ: Mapping[str, str] = os.environ, *, command: str = "serve"
) -> ServerConfig:
    """Read the command line, variables and the file. Raises OptionError; --help prints and exits."""
    parser = build_parser(command, OPTIONS, VLLM_FLAGS, _EPILOG)
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="Folder, hub id, GGUF file; or demo.")
    parser.add_argument("--config", metavar="FILE", help="YAML file of options.")
    words = canonical(_undotted(arguments, [*OPTIONS, *VLLM_FLAGS]), parser)
    given = vars(parser.parse_args(words))
    for other in VLLM_FLAGS:
        if other.flag in given:
            other.check(given.pop(other.flag))
    model_tag, file = given.pop("model_tag", None), given.pop("config", None)
    values = {
        **(from_file(OPTIONS, VLLM_FLAGS, Path(file)) if file else {}),
        **from_environment(OPTIONS, environ, PREFIX),
        **{
            option.field: option.value(given[option.field], option.flag)
            for option in OPTIONS
            if option.field in given
        },
    }
    _set_model(values, model_tag, "model" in given)
    if "api_key" not in values and environ.get("VLLM_API_KEY"):
        values["api_key"] = [environ["VLLM_API_KEY"]]
    return _build(values)


def from_python(keywords: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> ServerConfig:
    """Read keyword options, such as max_model_len="32k", as flags are read.

    Of the variables only that of the cluster's key counts: a secret should not stand in a program. Raises
    OptionError, which names options as keywords.
    """
    try:
        key = {name: text for name, text in environ.items() if name == f"{PREFIX}CLUSTER_KEY"}
        values = from_environment(OPTIONS, key, PREFIX) | from_keywords(OPTIONS, VLLM_FLAGS, keywords)
        _set_model(values, None, by_flag=False)
        return _build(values)
    except OptionError as error:
        raise OptionError(_FLAG.sub(lambda flag: flag[1].replace("-", "_"), str(error))) from error


_FLAG = re.compile(r"(?<!\S)--([a-z][a-z-]+)")


def _set_model(values: dict[str, object], tag: str | None, by_flag: bool) -> None:
    if tag is not None and by_flag and tag != values["model"]:
        raise OptionError(f"two models are named: {tag} and --model {values['model']}; leave out one")
    if tag is not None:
        values["model"] = tag
    values.setdefault("model", "demo")


def _build(values: dict[str, object]) -> ServerConfig:
    overlap = values.pop("async_scheduling", None)
    if overlap is not None and values.setdefault("steps_ahead", int(bool(overlap))) != int(bool(overlap)):
        raise OptionError("--async-scheduling and --steps-ahead contradict each other; leave out one")
    _add_guesses(values)
    if values.get("model_impl") == "vllm":
        values["model_impl"] = "facet"  # the name that vLLM gives its own model code
    config = assemble(ServerConfig, values)
    check(config)
    if not config.media.takes_any:
        config = assemble(ServerConfig, {**values, "language_model_only": True})
    return config


def _add_guesses(values: dict[str, object]) -> None:
    """Put the shorthands of --speculative-config into it. Raises OptionError if they contradict it."""
    asked = {
        field: given for name, field in _GUESSES.items() if (given := values.pop(name, None)) is not None
    }
    if not asked:
        return
    known = values.get("speculative_config", {})
    whole: dict[str, object] = {**(known if isinstance(known, dict) else {})}
    for field, given in asked.items():
        if known is None or whole.setdefault(field, given) != given:
            raise OptionError(
                f"--speculative-config and the flag for its {field} contradict each other; leave out one"
            )
    values["speculative_config"] = whole


_DEFAULTS = {option.field: option.default for option in OPTIONS}


class EngineArgs:
    """The options of `serve`, with underscores, as attributes that can be read and changed.

    args = EngineArgs("Qwen/Qwen3-0.6B", max_model_len=4096)
    engine = LLMEngine.from_engine_args(args)
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        """Raises ValueError if an option is unknown or its value is wrong."""
        from_python({"model": model, **options})
        self.model = model
        self.__dict__.update(options)

    def options(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __getattr__(self, name: str) -> Any:
        """Returns the default of an option that was not given."""
        if name not in _DEFAULTS:
            raise AttributeError(f"there is no option {name}")
        return _DEFAULTS[name]

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({given})"


class AsyncEngineArgs(EngineArgs):
    """The same options for `AsyncLLM.from_engine_args`."""


def key_file_of_environment(environ: Mapping[str, str] = os.environ) -> str | None:
    """The file of keys that a server started now would use by its variable."""
    return environ.get(f"{PREFIX}API_KEY_FILE") or None


def client_key_of_environment(environ: Mapping[str, str] = os.environ) -> str | None:
    """The key that commands send to a server, by the same variables as the server's own, or OpenAI's."""
    names = (f"{PREFIX}API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY")
    return next((environ[name] for name in names if environ.get(name)), None)


def share_metrics(folder: Path) -> None:
    """Let prometheus_client count for several processes. It reads this variable when first imported."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)


def _undotted(arguments: Sequence[str], options: Sequence[Option | VllmFlag]) -> list[str]:
    """Gather flags with dots, --hf-overrides.rope_theta 1e6, in the JSON of the option whose parts they give.

    What stands later counts.
    """
    by_name = {name: option.flag for option in options if option.is_object for name in option.flags}
    dotted = {by_name[name] for name in map(_whose_part, arguments) if name in by_name}
    words: list[str] = []
    objects: dict[str, dict[str, object]] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        head, _, path = name.partition(".")
        flag = by_name.get(head.replace("_", "-"))
        if flag not in dotted:
            words.append(argument)
            continue
        if not equals and (value := next(rest, "")) == "":
            raise OptionError(f"{name} needs a value")
        inner = objects.setdefault(flag, {})
        if path:
            _put(inner, path.replace("-", "_").split("."), value, name)
        else:
            inner.update(_whole(value, flag))
    return [*words, *(word for flag, value in objects.items() for word in (flag, json.dumps(value)))]


def _whose_part(argument: str) -> str | None:
    """The flag before the dot, if this is a flag with a dot."""
    head, dot, _ = argument.partition("=")[0].partition(".")
    return head.replace("_", "-") if dot and head.startswith("-") else None


def _put(inner: dict[str, object], path: list[str], text: str, name: str) -> None:
    *outer, last = path
    for key in outer:
        found = inner.setdefault(key, {})
        if not isinstance(found, dict):
            raise OptionError(f"{name}: {key} is given as something else than an object")
        inner = found
    try:
        inner[last] = json.loads(text)
    except ValueError:
        inner[last] = text


def _whole(text: str, flag: str) -> dict[str, object]:
    try:
        return json_object(text)
    except ValueError as error:
        raise OptionError(f"{flag}: {error}") from error
