"""Everything that an operator may ask of a server: the options that are no engine's and no worker's own.

Each option is a field of a frozen struct, here, in `engine_core.config` or in `worker.options`. The command
line (see `serve --help`), the variables FACET_<FLAG>, the YAML file of --config, the keywords of `LLM` and
the reference page all come from it. Names and meanings are those of `vllm serve`; an option that differs
says so.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from engine_core.config import EngineConfig, Replicas
from server.options.adapter_options import AdapterOptions
from server.options.connection_options import ConnectionOptions
from server.options.media_options import MediaOptions
from server.options.model_name import shown_name
from server.options.plugin_options import PluginOptions
from worker import logs
from worker.option_groups import ACCESS, ANSWERS, HTTP, LOGS, MEMORY, MODEL, REPORTS, TEXT, WORKERS
from worker.options import OptionDoc, share_or_size
from worker.protocol import LogprobsMode


class VectorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the vectors that a model makes."""

    int8_ranges: Annotated[str | None, OptionDoc(MODEL)] = None
    """A file with the least and the greatest of each number of vectors, for the types int8 and uint8: .npy,
    or two lists in JSON. Without it, the ranges are those of each request's own vectors."""
    default_prompt_name: Annotated[str | None, OptionDoc(MODEL)] = None
    """The prompt to put before texts to embed if a request names none."""


class DecisionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of questions with fixed answers (docs/decisions_api.md)."""

    decide_orders: Annotated[int, OptionDoc(ANSWERS, least=1, most=2)] = 2
    """The number of orders in which a model is shown the options of a choice; the answer is the mean. 1 takes
    half the time, and the place of an option then counts."""
    calibration: Annotated[str | None, OptionDoc(ANSWERS)] = None
    """A file of temperatures for the probabilities of decisions, which `facet calibrate` writes."""


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of files, batches and kept responses: their folder, and how long they are kept."""

    batch_dir: Annotated[str | None, OptionDoc(HTTP)] = None
    """Folder of files, batches, and responses that are kept or computed later, which this server alone uses
    (docs/batches.md). What is in it survives restarts. Default: a temporary one that ends with the server."""
    batch_gib: Annotated[float | None, OptionDoc(HTTP, least=0.001)] = None
    """Maximum GiB of files, batches and responses. Default: 10 with --batch-dir, and 1 without."""

    response_store: Annotated[float | None, OptionDoc(HTTP, least=1, most=31_536_000)] = None
    """Seconds for which responses of /v1/responses are kept, unless a request has `store: false`: so long
    they can be continued by `previous_response_id`. With --batch-dir they survive restarts."""

    @property
    def most_bytes(self) -> int:
        usual = 1 if self.batch_dir is None else 10
        return int((usual if self.batch_gib is None else self.batch_gib) * (1 << 30))


_ANY: list[str] = msgspec.field(default_factory=lambda: ["*"])


Dialect = Literal["cohere", "tei", "voyage", "infinity", "llama.cpp"]
"""The APIs of which some have the same paths with other bodies or answers."""
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)

ReasoningField = Literal["both", "reasoning", "reasoning_content"]
"""The fields of a message that carry the reasoning: clients of different servers read different ones."""

GuessReportLevel = Literal["none", "summary", "detailed"]
"""How much answers tell of guesses."""

ToolStrictLevel = Literal["auto", "function", "parameter"]
"""What calls of tools are held to that are not strict."""


class AccessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of keys, quotas, and shares of clients."""

    api_key: Annotated[list[str], OptionDoc(ACCESS, is_secret=True)] = []
    """API keys, one of which every request must send, except to /live, /health, /ready and /ping. Other users
    of the machine can see the command line: the variable FACET_API_KEY is safer."""
    api_key_file: Annotated[str | None, OptionDoc(ACCESS, is_secret=True)] = None
    """File of keys with names, shares, quotas and rights (docs/access.md), which `facet keys add` writes. It
    is read again when it changes."""
    fair_between: Annotated[str, OptionDoc(ACCESS, ("addresses", "none"))] = "addresses"
    """Who shares the server fairly if there are no keys: client addresses (IPv6: networks of 64 bits; behind
    a proxy of this machine, what its X-Forwarded-For says), or none: then all are one."""
    max_queue_wait: Annotated[float, OptionDoc(ACCESS, least=0)] = 0.0
    """Seconds that a request may wait for the engine before it is refused with 503; 0 is no limit. For a
    request of many texts, the first counts."""
    request_timeout: Annotated[float, OptionDoc(ACCESS, least=0)] = 0.0
    """Seconds after which a request is ended with 504; 0 is never. The header X-Request-Timeout, or `timeout`
    in the body, may make it less."""

    @property
    def is_guarded(self) -> bool:
        """Whether requests need a key."""
        return bool(self.api_key) or self.api_key_file is not None


_LEVELS = {"trace": "debug", "notset": "debug", "warn": "warning", "fatal": "critical"}
"""Levels of uvicorn and second names of Python's, by what they are here."""


def _log_level(text: str) -> str:
    return _LEVELS.get(text.lower(), text.lower())


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the log."""

    enable_log_requests: Annotated[bool, OptionDoc(LOGS)] = False
    """Log each request's id, size and parameters."""
    enable_log_outputs: Annotated[bool, OptionDoc(LOGS)] = False
    """Log the text of each answer that has ended, by its request's id."""
    disable_log_stats: Annotated[bool, OptionDoc(LOGS)] = False
    """No line on throughput every ten seconds."""
    disable_uvicorn_access_log: Annotated[bool, OptionDoc(LOGS)] = False
    """No line for each HTTP request."""
    disable_access_log_for_endpoints: Annotated[str, OptionDoc(LOGS)] = ""
    """Paths whose requests have no such line, divided by commas: /health,/metrics."""
    debug_event_loop: Annotated[bool, OptionDoc(LOGS)] = False
    """Log a stack trace of whatever blocks an API process's event loop for more than 50 ms."""
    debug_steps: Annotated[bool, OptionDoc(LOGS)] = False
    """Log a stack trace of each part of an engine's steps that takes five times as long as expected, and more
    than 50 ms."""
    uvicorn_log_level: Annotated[
        str,
        OptionDoc(
            LOGS, ("critical", "error", "warning", "info", "debug"), read=_log_level, short="--log-level"
        ),
    ] = "info"
    """What to log."""
    log_format: Annotated[str, OptionDoc(LOGS, ("text", "json"))] = "text"
    """Lines of the log: text for people, json for programs."""
    log_config_file: Annotated[str | None, OptionDoc(LOGS)] = None
    """A JSON file of what `logging.config.dictConfig` takes, for every process (docs/logs.md)."""

    @property
    def style(self) -> str:
        """What `worker.logs.setup` is told in every process."""
        return logs.style(self.uvicorn_log_level, self.log_format, self.log_config_file)

    @property
    def quiet_paths(self) -> frozenset[str]:
        """Paths whose requests are not logged."""
        parts = (part.strip() for part in self.disable_access_log_for_endpoints.split(","))
        return frozenset(part for part in parts if part)


class ReportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of what answers and traces tell about requests."""

    enable_timing: Annotated[bool, OptionDoc(REPORTS)] = False
    """Report in usage where the time went, in streams with the last chunk."""
    enable_timing_headers: Annotated[bool, OptionDoc(REPORTS)] = False
    """Report in headers of whole answers the times of queue, prefill and decoding, and how many prompt tokens
    were cached: x-facet-queue-ms, -prefill-ms, -decode-ms, -cached-tokens."""
    per_request_spec_decode_metrics: Annotated[
        GuessReportLevel, OptionDoc(REPORTS, ("none", "summary", "detailed"))
    ] = "none"
    """Report in answers, as `metrics.speculative_decoding`, how many proposed tokens were accepted, if the
    request has one choice: sums, or also step by step (detailed)."""
    otlp_traces_endpoint: Annotated[str | None, OptionDoc(REPORTS)] = None
    """Where a span of each request is sent, by OTLP over HTTP: the whole URL, such as
    http://localhost:4318/v1/traces. Needs the extra otel."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an operator may ask of a server, its engines and their workers."""

    engine: EngineConfig = EngineConfig(model="demo")

    served_model_name: Annotated[list[str], OptionDoc(MODEL)] = []
    """Names that clients may use for the model; answers carry the first. Default: the hub id, or the last
    part of a folder's path; requests may use the whole path, too."""
    models: Annotated[str | None, OptionDoc(MODEL)] = None
    """Serve several models: a TOML file of them, or a folder in which each folder or GGUF file is one
    (docs/several_models.md). Without names and options of their own: `serve MODEL MODEL`."""
    memory: Annotated[float | None, OptionDoc(MEMORY, read=share_or_size)] = None
    """Memory budget of a server of several models, all processes included: a size such as 2.5G, or a share of
    the machine's, 0.5 or 50% (default: 80%). On CUDA the memory of each card, for models alone (default:
    92%). When another model needs room, the one that was not used for longest is unloaded."""
    show_root: Annotated[bool, OptionDoc(MODEL)] = False
    """Tell the model's hub id or path as `root` in /v1/models, not its name."""
    tokenizer: Annotated[str | None, OptionDoc(TEXT)] = None
    """Folder or hub id of a tokenizer, if not the model's."""
    tokenizer_revision: Annotated[str | None, OptionDoc(TEXT)] = None
    """Branch, tag or commit of the tokenizer on the hub, if not the model's."""
    skip_tokenizer_init: Annotated[bool, OptionDoc(TEXT)] = False
    """Load no tokenizer: prompts are token ids, answers have no text but ids (return_token_ids), and no stop
    strings."""
    enable_tokenizer_info_endpoint: Annotated[bool, OptionDoc(TEXT)] = False
    """Tell at /tokenizer_info what the tokenizer's files say, the chat template among it."""
    chat_template: Annotated[str | None, OptionDoc(TEXT)] = None
    """A Jinja template, or a file with one."""
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"], OptionDoc(TEXT, ("auto", "string", "openai"))
    ] = "auto"
    """How the template takes contents; auto looks into it."""
    default_chat_template_kwargs: Annotated[dict[str, object], OptionDoc(TEXT)] = {}
    """Arguments for the chat template, if a request gives none."""
    trust_request_chat_template: Annotated[bool, OptionDoc(TEXT)] = False
    """Let requests bring a chat template: a program, which gets 2 s and 256 MiB."""
    special_tokens_in_messages: Annotated[bool, OptionDoc(TEXT)] = False
    """Read control tokens in the text of messages as control tokens, not as ordinary text. A quoted document
    can then forge turns."""
    response_role: Annotated[str, OptionDoc(TEXT)] = "assistant"
    """Role of the answers in chat."""

    generation_config: Annotated[str, OptionDoc(ANSWERS)] = "auto"
    """Sampling defaults: auto is the model's own or its authors', vllm neutral ones, or a folder, whose
    max_new_tokens is the most of every request."""
    override_generation_config: Annotated[dict[str, object], OptionDoc(ANSWERS)] = {}
    """Sampling defaults that replace those. max_new_tokens is the most of every request."""
    max_logprobs: Annotated[int, OptionDoc(ANSWERS, least=-1)] = 20
    """Maximum number of logprobs that a request may ask for; -1 is no limit."""
    logprobs_mode: Annotated[LogprobsMode, OptionDoc(ANSWERS, get_args(LogprobsMode))] = "raw_logprobs"
    """What answers show as logprobs, and best_of ranks by: logprobs or logits as the model gives them to what
    a grammar lets come, or as tokens are drawn, behind masks, bias, penalties, temperature and filters. Those
    of prompts are raw logprobs."""
    stream_interval: Annotated[int, OptionDoc(ANSWERS, least=1)] = 1
    """Tokens in a streamed chunk; the first comes alone."""
    enable_prompt_tokens_details: Annotated[bool, OptionDoc(ANSWERS)] = False
    """Report cached prompt tokens in usage."""
    tool_call_parser: Annotated[str, OptionDoc(ANSWERS)] = "auto"
    """Parser of tool calls: a name, none, or auto, which detects it from the chat template."""
    tool_strict_level: Annotated[ToolStrictLevel, OptionDoc(ANSWERS, ("auto", "function", "parameter"))] = (
        "auto"
    )
    """What a grammar enforces in calls of tools that are not strict: nothing (auto), their form and names
    (function), or also their arguments (parameter)."""
    reasoning_parser: Annotated[str, OptionDoc(ANSWERS)] = "auto"
    """Parser of reasoning: a name, none, or auto, which detects it from the chat template."""
    reasoning_field: Annotated[
        ReasoningField, OptionDoc(ANSWERS, ("both", "reasoning", "reasoning_content"))
    ] = "both"
    """Fields of answers that carry the reasoning."""
    moderation_categories: Annotated[str | None, OptionDoc(ANSWERS)] = None
    """JSON file of the categories that labels mean in /v1/moderations (docs/moderations.md)."""
    dialect: Annotated[Dialect, OptionDoc(ANSWERS, DIALECTS)] = "cohere"
    """The API whose form /rerank, /classify, /v1/embeddings and /tokenize have, where several have such a
    path, unless the header X-Facet-Dialect names one. cohere is Jina's and vLLM's form, too."""
    strict_fields: Annotated[bool, OptionDoc(ANSWERS)] = False
    """Refuse all unknown fields of requests. By default only likely typos are refused; other unknown fields
    are ignored, and the header `Warning` names them."""
    enable_force_include_usage: Annotated[bool, OptionDoc(ANSWERS)] = False
    """Send usage in every stream."""
    return_tokens_as_token_ids: Annotated[bool, OptionDoc(ANSWERS)] = False
    """In logprobs, tokens as token_id:123."""
    sse_keep_alive_interval: Annotated[float, OptionDoc(ANSWERS, least=0)] = 15.0
    """Seconds of silence after which a stream sends a comment, such as `: waiting 12 ahead` or `: reading
    4096 of 9000`; 0 is never. Unlike vLLM's, not 0 by default: silence means that the server is gone."""

    host: Annotated[str, OptionDoc(HTTP)] = "127.0.0.1"
    """Address to listen on. Unlike vLLM's, only this machine by default: 0.0.0.0 for all."""
    port: Annotated[int, OptionDoc(HTTP, least=0, most=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    uds: Annotated[str | None, OptionDoc(HTTP)] = None
    """Unix socket to listen on, instead of host and port."""
    root_path: Annotated[str, OptionDoc(HTTP)] = ""
    """Path prefix under which a proxy serves this server."""
    allowed_origins: Annotated[list[str], OptionDoc(HTTP)] = []
    """Origins that browsers may call from (CORS)."""
    allowed_methods: Annotated[list[str], OptionDoc(HTTP)] = _ANY
    """Methods that browsers may use."""
    allowed_headers: Annotated[list[str], OptionDoc(HTTP)] = _ANY
    """Headers that browsers may send."""
    allow_credentials: Annotated[bool, OptionDoc(HTTP)] = False
    """Let browsers send credentials."""
    allowed_hosts: Annotated[list[str], OptionDoc(HTTP)] = []
    """Names under which clients reach this server, beside localhost and its address; * for any. Checked if
    this is given or only this machine is listened to."""
    max_connections: Annotated[int, OptionDoc(HTTP, least=1)] = 4096
    """Maximum number of connections of an API process at a time; see also ulimit -n."""
    insecure: Annotated[bool, OptionDoc(HTTP)] = False
    """Let other machines use this server without a key, and ranks communicate at a public address."""
    enable_request_id_headers: Annotated[bool, OptionDoc(HTTP)] = False
    """Answer with an X-Request-Id header."""
    disable_page: Annotated[bool, OptionDoc(HTTP)] = False
    """No page for people at / (docs/page.md)."""
    ollama: Annotated[bool, OptionDoc(HTTP)] = True
    """Serve Ollama's API below /api/ (docs/ollama.md)."""
    disable_fastapi_docs: Annotated[bool, OptionDoc(HTTP)] = False
    """No /docs and no /openapi.json."""
    server_dev_mode: Annotated[bool, OptionDoc(HTTP)] = False
    """Serve vLLM's development routes (VLLM_SERVER_DEV_MODE), which change the server's state: not for public
    servers."""

    connections: ConnectionOptions = ConnectionOptions()
    plugins: PluginOptions = PluginOptions()
    reports: ReportOptions = ReportOptions()
    access: AccessOptions = AccessOptions()
    media: MediaOptions = MediaOptions()
    vectors: VectorOptions = VectorOptions()
    batches: BatchOptions = BatchOptions()
    decisions: DecisionOptions = DecisionOptions()
    adapters: AdapterOptions = AdapterOptions()

    data_parallel_size: Annotated[int, OptionDoc(WORKERS, least=1, short="-dp")] = 1
    """Replicas of the model, among which requests are spread."""
    data_parallel_size_local: Annotated[int | None, OptionDoc(WORKERS, least=0, short="-dpl")] = None
    """How many run on this machine; default: all that no other does."""
    data_parallel_start_rank: Annotated[int, OptionDoc(WORKERS, least=0, short="-dpr")] = 0
    """The number of this machine's first replica, with --headless or --data-parallel-hybrid-lb."""
    data_parallel_address: Annotated[str, OptionDoc(WORKERS, short="-dpa")] = "127.0.0.1"
    """Address of the machine with the API, as replicas on others reach it."""
    data_parallel_rpc_port: Annotated[int, OptionDoc(WORKERS, least=1, most=65000, short="-dpp")] = 29550
    """Port there, for those replicas; each API process takes two more."""
    data_parallel_backend: Annotated[str, OptionDoc(WORKERS, choices=("mp", "ray"), short="-dpb")] = "mp"
    """Who starts replicas on other machines: somebody there, by --headless (mp), or Ray (ray), which then
    places all but those of --data-parallel-size-local."""
    data_parallel_rank: Annotated[int | None, OptionDoc(WORKERS, least=0, short="-dpn")] = None
    """The number of this server's replica, if each has a server of its own behind a load balancer."""
    data_parallel_external_lb: Annotated[bool, OptionDoc(WORKERS, short="-dpe")] = False
    """The same, said by name: it goes with --data-parallel-rank."""
    data_parallel_hybrid_lb: Annotated[bool, OptionDoc(WORKERS, short="-dph")] = False
    """A server for each machine behind a load balancer, which knows its own replicas only."""
    headless: Annotated[bool, OptionDoc(WORKERS)] = False
    """No API here: only workers (--nnodes) or replicas for another machine's API."""

    api_server_count: Annotated[int, OptionDoc(LOGS, least=0, most=64, short="-asc")] = 1
    """API processes that share the port, for very many small requests; 0 is --headless."""
    shutdown_timeout: Annotated[float, OptionDoc(LOGS, least=0)] = 25.0
    """Seconds that requests may run on after SIGTERM; 0 ends them at once. The default leaves 5 of the 30
    that Kubernetes and systemd units usually grant."""
    drain_delay: Annotated[float, OptionDoc(LOGS, least=0)] = 0.0
    """Seconds after SIGTERM for which /ready says 503 and requests are still taken, so that load balancers
    notice before anybody is refused."""
    restart_wait: Annotated[float | None, OptionDoc(LOGS, least=0)] = None
    """Seconds for which requests wait while a broken engine is started again. Default: three times what its
    last start took without downloads, but at least 10."""
    exit_on_failure: Annotated[bool, OptionDoc(LOGS)] = False
    """Exit with code 1 when a process broke too often to be started again. Without it the server stays, and
    answers 503 with the reason. One that the system kills for want of memory is always started again."""

    log: LogOptions = LogOptions()

    @property
    def replicas(self) -> Replicas:
        first, here = self.data_parallel_start_rank, self.data_parallel_size_local
        if (rank := self.data_parallel_rank) is not None:
            first, here = rank, 1
        by_ray = self.data_parallel_backend == "ray"
        if here is None:
            here = 0 if by_ray else self.data_parallel_size - first
        return Replicas(
            size=self.data_parallel_size,
            first=first,
            here=here,
            address=self.data_parallel_address,
            port=self.data_parallel_rpc_port,
            secret=self.engine.cluster_key,
            apart=rank is not None or self.data_parallel_hybrid_lb,
            by_ray=by_ray,
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


VllmConfig = ServerConfig
"""The name by which programs that were written for vLLM know it."""
