"""The one table of options, and the only reader of the environment but for what the system says there
(`worker.host.machine`).

Each option is a field of a frozen struct, here, in `engine_core.config` or in `worker.options`. The command
line (see `serve --help`), the variables FACET_<FLAG>, the YAML file of --config, the keywords of `LLM` and
the reference page all come from it. Names and meanings are those of `vllm serve`; an option that differs
says so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from engine_core.config import WORKERS, EngineConfig, Replicas
from server.options.access import ACCESS, AccessOptions
from server.options.dotted import undotted
from server.options.log_options import LOGS, LogOptions
from server.options.machines import check_nodes, check_replicas
from server.options.names import shown_name
from server.options.reader import (
    Option,
    OptionError,
    assemble,
    build_parser,
    canonical,
    from_environment,
    from_file,
    from_keywords,
    options_of,
)
from server.options.reports import REPORTS, ReportOptions, check_traces
from server.options.vllm_flags import VLLM_FLAGS
from worker.options import MEMORY, MODEL, SCHEDULER, Doc

PREFIX = "FACET_"

_TEXT, _ANSWERS, _HTTP = "Tokenizer and chat template", "Answers", "HTTP"

_ANY: list[str] = msgspec.field(default_factory=lambda: ["*"])


ReasoningField = Literal["both", "reasoning", "reasoning_content"]
"""The fields of a message that carry the reasoning: clients of different servers read different ones."""

ToolStrictLevel = Literal["auto", "function", "parameter"]
"""What calls of tools are held to that are not strict."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an operator may ask of a server, its engines and their workers."""

    engine: EngineConfig

    served_model_name: Annotated[
        list[str],
        Doc(
            MODEL,
            "Names that clients may use for the model; answers carry the first. Default: the hub id, or the "
            "last part of a folder's path; requests may use the whole path, too.",
        ),
    ] = []
    show_root: Annotated[
        bool, Doc(MODEL, "Tell the model's hub id or path as `root` in /v1/models, not its name.")
    ] = False
    tokenizer: Annotated[str | None, Doc(_TEXT, "Folder or hub id of the tokenizer, if not the model's.")] = (
        None
    )
    chat_template: Annotated[str | None, Doc(_TEXT, "A Jinja template, or a file with one.")] = None
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Doc(_TEXT, "How the template takes contents; auto looks into it.", ("auto", "string", "openai")),
    ] = "auto"
    default_chat_template_kwargs: Annotated[
        dict[str, object], Doc(_TEXT, "Arguments for the template where a request gives none.")
    ] = {}
    trust_request_chat_template: Annotated[
        bool, Doc(_TEXT, "Let requests bring a chat template: a program, which gets 2 s and 256 MiB.")
    ] = False
    default_prompt_name: Annotated[
        str | None,
        Doc(_TEXT, "The prompt that is written before texts to embed where a request names none."),
    ] = None
    response_role: Annotated[str, Doc(_TEXT, "Role of the answers in chat.")] = "assistant"

    generation_config: Annotated[
        str, Doc(_ANSWERS, "Sampling defaults: auto is the model's own, vllm is neutral ones, or a folder.")
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, object], Doc(_ANSWERS, "Sampling defaults to put over those.")
    ] = {}
    max_logprobs: Annotated[
        int, Doc(_ANSWERS, "Most logprobs that a request may ask for; -1 is no bound.", least=-1)
    ] = 20
    stream_interval: Annotated[
        int, Doc(_ANSWERS, "Tokens in a streamed chunk; the first comes alone.", least=1)
    ] = 1
    enable_prompt_tokens_details: Annotated[bool, Doc(_ANSWERS, "Report cached prompt tokens in usage.")] = (
        False
    )
    tool_call_parser: Annotated[
        str, Doc(_ANSWERS, "How tool calls are written: a parser's name, none, or auto asks the template.")
    ] = "auto"
    tool_strict_level: Annotated[
        ToolStrictLevel,
        Doc(
            _ANSWERS,
            "What calls are held to where a tool is not strict: auto is nothing, function is their form and "
            "names, parameter their arguments too.",
            ("auto", "function", "parameter"),
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str, Doc(_ANSWERS, "How reasoning is marked: a parser's name, none, or auto asks the template.")
    ] = "auto"
    reasoning_field: Annotated[
        ReasoningField,
        Doc(_ANSWERS, "Fields that carry it.", ("both", "reasoning", "reasoning_content")),
    ] = "both"
    ignore_unknown_fields: Annotated[
        bool, Doc(_ANSWERS, "Accept fields of requests that this server does not know, without effect.")
    ] = False
    enable_force_include_usage: Annotated[bool, Doc(_ANSWERS, "Send usage in every stream.")] = False
    return_tokens_as_token_ids: Annotated[bool, Doc(_ANSWERS, "In logprobs, tokens as token_id:123.")] = False
    sse_keep_alive_interval: Annotated[
        float,
        Doc(
            _ANSWERS,
            "Seconds of silence after which a stream sends a comment, such as `: waiting 12 ahead` or "
            "`: reading 4096 of 9000`; 0 is never. Unlike vLLM's, not 0 by default: silence means that the "
            "server is gone.",
            least=0,
        ),
    ] = 15.0

    host: Annotated[
        str,
        Doc(_HTTP, "Address to listen on. Unlike vLLM's, only this machine by default: 0.0.0.0 for all."),
    ] = "127.0.0.1"
    port: Annotated[int, Doc(_HTTP, "Port to listen on; 0 takes a free one.", least=0, most=65535)] = 8000
    uds: Annotated[str | None, Doc(_HTTP, "Unix socket to listen on, in place of host and port.")] = None
    ssl_keyfile: Annotated[str | None, Doc(_HTTP, "Key file, to serve HTTPS.")] = None
    ssl_certfile: Annotated[str | None, Doc(_HTTP, "Certificate file, to serve HTTPS.")] = None
    ssl_ca_certs: Annotated[str | None, Doc(_HTTP, "Authorities whose client certificates are accepted.")] = (
        None
    )
    root_path: Annotated[str, Doc(_HTTP, "Path under which a proxy shows this server.")] = ""
    allowed_origins: Annotated[list[str], Doc(_HTTP, "Origins that browsers may call from (CORS).")] = []
    allowed_methods: Annotated[list[str], Doc(_HTTP, "Methods that browsers may use.")] = _ANY
    allowed_headers: Annotated[list[str], Doc(_HTTP, "Headers that browsers may send.")] = _ANY
    allow_credentials: Annotated[bool, Doc(_HTTP, "Let browsers send credentials.")] = False
    allowed_hosts: Annotated[
        list[str],
        Doc(
            _HTTP,
            "Names under which clients reach this server, beside localhost and its address; * for any. "
            "Checked if this is given or only this machine is listened to.",
        ),
    ] = []
    max_connections: Annotated[
        int, Doc(_HTTP, "Connections that an API process serves at a time; see also ulimit -n.", least=1)
    ] = 4096
    insecure: Annotated[
        bool,
        Doc(_HTTP, "Let other machines use this server without a key, and ranks meet at a public address."),
    ] = False
    enable_request_id_headers: Annotated[bool, Doc(_HTTP, "Answer with an X-Request-Id header.")] = False
    disable_page: Annotated[bool, Doc(_HTTP, "No page for people at / (docs/page.md).")] = False
    disable_fastapi_docs: Annotated[bool, Doc(_HTTP, "No /docs and no /openapi.json.")] = False

    reports: ReportOptions = ReportOptions()

    access: AccessOptions = AccessOptions()

    data_parallel_size: Annotated[
        int, Doc(WORKERS, "Replicas of the model, among which requests are spread.", least=1, short="-dp")
    ] = 1
    data_parallel_size_local: Annotated[
        int | None,
        Doc(WORKERS, "How many run on this machine; default: all that no other does.", least=0, short="-dpl"),
    ] = None
    data_parallel_start_rank: Annotated[
        int,
        Doc(WORKERS, "With --headless: the number of this machine's first replica.", least=0, short="-dpr"),
    ] = 0
    data_parallel_address: Annotated[
        str,
        Doc(WORKERS, "Address of the machine with the API, as replicas on others reach it.", short="-dpa"),
    ] = "127.0.0.1"
    data_parallel_rpc_port: Annotated[
        int,
        Doc(
            WORKERS,
            "Port there, for those replicas; each API process takes two more.",
            least=1,
            most=65000,
            short="-dpp",
        ),
    ] = 29550
    headless: Annotated[
        bool, Doc(WORKERS, "No API here: only workers (--nnodes) or replicas for another machine's API.")
    ] = False

    api_server_count: Annotated[
        int,
        Doc(
            LOGS,
            "API processes that share the port, for very many small requests.",
            least=1,
            most=64,
            short="-asc",
        ),
    ] = 1
    shutdown_timeout: Annotated[
        float,
        Doc(
            LOGS,
            "Seconds that requests may run on after SIGTERM; 0 ends them at once. The default leaves 5 of "
            "the 30 that Kubernetes and systemd units usually grant.",
            least=0,
        ),
    ] = 25.0
    drain_delay: Annotated[
        float,
        Doc(
            LOGS,
            "Seconds after SIGTERM for which /ready says 503 and requests are still taken, so that load "
            "balancers notice before anybody is refused.",
            least=0,
        ),
    ] = 0.0
    restart_wait: Annotated[
        float,
        Doc(LOGS, "Seconds for which requests wait while a broken engine is started again.", least=0),
    ] = 10.0
    exit_on_failure: Annotated[
        bool,
        Doc(
            LOGS,
            "Exit with code 1 when a process broke too often to be started again. Without it the server "
            "stays, and answers 503 with the reason.",
        ),
    ] = False

    log: LogOptions = LogOptions()

    @property
    def replicas(self) -> Replicas:
        first, here = self.data_parallel_start_rank, self.data_parallel_size_local
        return Replicas(
            size=self.data_parallel_size,
            first=first,
            here=self.data_parallel_size - first if here is None else here,
            address=self.data_parallel_address,
            port=self.data_parallel_rpc_port,
            secret=self.engine.cluster_key,
            together=self.engine.enable_expert_parallel and self.data_parallel_size > 1,
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the model that clients are told."""
        return tuple(self.served_model_name) or (shown_name(self.engine.model),)

    def is_own_path(self, name: str) -> bool:
        """Whether clients of vLLM may use this name: they call a model without a name by its path."""
        return name == self.engine.model and not self.served_model_name

    @property
    def root(self) -> str:
        """The model's origin, as far as clients are told."""
        return self.engine.model if self.show_root else self.model_names[0]


class _Shorthands(msgspec.Struct, frozen=True):
    """Options that stand for others."""

    async_scheduling: Annotated[
        bool | None, Doc(SCHEDULER, "Plan a step while another runs; the same as --steps-ahead 1, or 0.")
    ] = None


_GROUPS = (MODEL, MEMORY, WORKERS, SCHEDULER, _TEXT, _ANSWERS, _HTTP, REPORTS, ACCESS, LOGS)

OPTIONS: list[Option] = sorted(
    [*options_of(ServerConfig), *options_of(_Shorthands)],
    key=lambda option: _GROUPS.index(option.doc.group),
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
    words = canonical(undotted(arguments, [*OPTIONS, *VLLM_FLAGS]), parser)
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
    if values.get("model_impl") == "vllm":
        values["model_impl"] = "facet"  # the name that vLLM gives its own model code
    config = assemble(ServerConfig, values)
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
    check_traces(config.reports)
    check_nodes(
        config.engine,
        headless=config.headless,
        replicas=config.data_parallel_size,
        insecure=config.insecure,
    )
    check_replicas(config.engine, config.replicas, headless=config.headless)
    return config


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
