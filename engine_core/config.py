"""Options of an engine, and what an engine process gets at its start."""

from __future__ import annotations

from typing import Annotated, get_args

import msgspec

from worker.option_groups import MEMORY, MODEL, SCHEDULER, WORKERS
from worker.options import OptionDoc, WorkerOptions
from worker.protocol import Task

_GATHERING = ("naive",)
_DISPATCHING = (
    *("pplx", "deepep_high_throughput", "deepep_low_latency", "mori", "mori_high_throughput"),
    *("mori_low_latency", "nixl_ep", "flashinfer_all2allv", "flashinfer_nvlink_one_sided"),
    "flashinfer_nvlink_two_sided",
)
"""vLLM's other ways for tokens to reach experts: to all ranks, or to those alone that have one of theirs."""

LEAST_KEY_CHARACTERS = 16
_KEY_REMEDY = "make one with `openssl rand -hex 32` and set it as FACET_CLUSTER_KEY on every machine"

TASKS: tuple[str, ...] = (
    "generate",
    "transcription",
    *(task for task in get_args(Task) if task not in ("align", "decide")),
)
"""Every task that an operator may have an engine offer."""


OLD_TASKS: dict[str, dict[str, str]] = {
    "auto": {},
    "score": {"runner": "pooling"},
    "reward": {"runner": "pooling", "convert": "reward"},
}
"""Tasks of older versions of vLLM, and the options that ask for the same today."""


def _is_old_task(name: str) -> bool:
    return _runner(name) in (*OLD_TASKS, "embedding")


def _runner(name: str) -> str:
    """Refuse vLLM's runner of drafters, with the option that names one."""
    if name == "draft":
        raise ValueError(
            "a draft model answers no requests; it belongs in --speculative-config '{\"model\": ...}' of "
            "the target model"
        )
    return name


def _all2all_backend(name: str) -> str:
    """Refuse names of vLLM that mean nothing here, with the one to use instead."""
    if name in _GATHERING:
        raise ValueError(
            f"{name} is not supported: use allgather_reducescatter, which sends all tokens to all ranks too"
        )
    if name in _DISPATCHING:
        raise ValueError(
            f"{name} is not supported, since it needs a library for some kinds of networks: use all_to_all, "
            "which also sends a token only to ranks that have an expert of it"
        )
    return name


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an operator may ask of an engine and its workers."""

    model: Annotated[str, OptionDoc(MODEL)]
    """Folder or hub id of the model, a GGUF file, demo for the built-in one, or minilm (embeds), smollm2
    (chats) or whisper-tiny.en (transcribes) for published ones that packages carry. MODEL for short."""
    revision: Annotated[str | None, OptionDoc(MODEL)] = None
    """Branch, tag or commit of the model on the hub."""
    download_dir: Annotated[str | None, OptionDoc(MODEL)] = None
    """Folder for downloads, instead of the hub's usual cache."""
    quant: Annotated[str | None, OptionDoc(MODEL)] = None
    """The GGUF file of a folder or hub id to serve, by what its name says, such as Q4_K_M; a hub id may
    have it behind a colon."""
    hf_config_path: Annotated[str | None, OptionDoc(MODEL)] = None
    """Folder or hub id whose config.json counts in place of what a GGUF file says."""
    hf_overrides: Annotated[dict[str, object], OptionDoc(MODEL)] = {}
    """Values that replace those of the model's config.json."""
    runner: Annotated[str, OptionDoc(MODEL, ("auto", "generate", "pooling"), read=_runner)] = "auto"
    """What the model does: generate text, or pool texts to vectors, labels and scores. auto goes by the
    checkpoint. A model that generates also pools, with the same weights."""
    convert: Annotated[str, OptionDoc(MODEL, ("auto", "none", "embed", "classify", "reward"))] = "auto"
    """Serve a model as another kind than it was trained for, such as embed; auto goes by the checkpoint."""
    tasks: Annotated[list[str], OptionDoc(MODEL, TASKS, short="--task", others=_is_old_task)] = []
    """Tasks to offer, instead of all that the model does: generate, transcription, embed, token_embed,
    classify, token_classify, sparse_embed, ner. Commas may separate them."""
    pooler_config: Annotated[dict[str, object], OptionDoc(MODEL)] = {}
    """How hidden states become vectors and labels; replaces what the model's files say: task, pooling_type,
    seq_pooling_type, tok_pooling_type, use_activation, dimensions, logit_mean, logit_sigma, step_tag_id,
    returned_token_ids, enable_chunked_processing, max_embed_len."""

    worker: WorkerOptions = WorkerOptions()
    enable_sleep_mode: Annotated[bool, OptionDoc(MEMORY)] = False
    """Let administrators free the memory of weights and cache (POST /sleep) until POST /wake_up."""

    tensor_parallel_size: Annotated[int, OptionDoc(WORKERS, least=1, short="-tp")] = 1
    """Workers that share every layer of the model."""
    pipeline_parallel_size: Annotated[int, OptionDoc(WORKERS, least=1, short="-pp")] = 1
    """Pipeline stages: groups of consecutive layers, each with workers of its own."""
    enable_expert_parallel: Annotated[bool, OptionDoc(WORKERS, short="-ep")] = False
    """Give each worker some whole experts of a mixture-of-experts model, instead of a slice of every expert.
    With --data-parallel-size, all replicas share one set of experts, and step, end and start together."""
    expert_placement_strategy: Annotated[str, OptionDoc(WORKERS, ("linear", "round_robin"))] = "linear"
    """The experts of a worker: neighbouring ones (linear), or every n-th of n workers (round_robin)."""
    all2all_backend: Annotated[
        str | None, OptionDoc(WORKERS, ("allgather_reducescatter", "all_to_all"), read=_all2all_backend)
    ] = None
    """How tokens reach whole experts on other workers, and results come back: all tokens go to all replicas
    and sums return (allgather_reducescatter, the default), or a token goes where its experts are and each of
    them returns its result by itself (all_to_all)."""
    distributed_executor_backend: Annotated[str | None, OptionDoc(WORKERS, ("uni", "mp", "ray"))] = None
    """How workers run: in the engine's process (uni), in processes of their own (mp), or placed over the
    machines of a Ray cluster (ray). Default: uni for one worker, mp for more."""
    nnodes: Annotated[int, OptionDoc(WORKERS, least=1, short="-n")] = 1
    """Machines over which one model is spread, without Ray."""
    node_rank: Annotated[int, OptionDoc(WORKERS, least=0, short="-r")] = 0
    """The number of this one of them; all but 0 are started with --headless."""
    master_addr: Annotated[str, OptionDoc(WORKERS)] = "127.0.0.1"
    """Address of the machine with --node-rank 0, as the others reach it."""
    master_port: Annotated[int, OptionDoc(WORKERS, least=1, most=65534)] = 29501
    """Port there, for the workers to join; the next one is theirs too."""
    cluster_key: Annotated[str | None, OptionDoc(WORKERS, is_secret=True)] = None
    """A secret, the same on all machines, without which none may join: best set as a variable, which no list
    of processes shows. Any long random text."""

    max_num_queued_reqs: Annotated[int | None, OptionDoc(SCHEDULER, least=0)] = None
    """Waiting requests beyond which new ones get 503 and Retry-After (default: 8192)."""
    max_num_queued_tokens: Annotated[int | None, OptionDoc(SCHEDULER, least=0)] = None
    """Tokens of waiting prompts beyond which new requests get 503 and Retry-After (default: 4194304)."""
    enable_prefix_caching: Annotated[bool, OptionDoc(SCHEDULER)] = True
    """Prefix caching: reuse what was computed for prompts that begin alike."""
    enable_chunked_prefill: Annotated[bool, OptionDoc(SCHEDULER)] = True
    """Process long prompts in chunks, between the steps of other requests."""
    long_prefill_token_threshold: Annotated[int, OptionDoc(SCHEDULER, least=0)] = 0
    """Maximum number of prompt tokens of one sequence in a step while others run; 0 is no limit."""
    max_token_gap_ms: Annotated[float | None, OptionDoc(SCHEDULER, least=0)] = None
    """Target for the time between two tokens of a stream, in ms: while anyone streams, no step is planned
    that is expected to take longer, and prompts are processed in smaller chunks. 0 is no limit. Default: on a
    CPU 50, or four times what the decoding rows take if that is longer, and up to 220 while prompts wait for
    their first tokens; elsewhere 0. Unless it is 0, steps on a CPU have some 512 tokens while nobody
    streams, or more for an only prompt where reading the weights takes long, if the model generates."""
    enable_logging_iteration_details: Annotated[bool, OptionDoc(SCHEDULER)] = False
    """Log each step: what it computed, how long it was expected to take, and how long it took."""
    max_num_encoder_input_tokens: Annotated[int | None, OptionDoc(SCHEDULER, least=1)] = None
    """Maximum number of embeddings of pictures that are encoded in a step, if it encodes several. Default: as
    many as the step has tokens."""
    disable_chunked_mm_input: Annotated[bool, OptionDoc(SCHEDULER)] = False
    """Compute all tokens of a picture in one step."""
    mm_processor_cache_gb: Annotated[float, OptionDoc(SCHEDULER, least=0)] = 4.0
    """Maximum GiB of prepared items that an API process caches; 0 caches none. An engine holds as much for
    running requests, but at least 1: requests beyond that get 503."""
    scheduling_policy: Annotated[str, OptionDoc(SCHEDULER, ("fcfs", "priority"))] = "fcfs"
    """Order of requests."""
    engine_ready_timeout: Annotated[
        float, OptionDoc(SCHEDULER, least=1, short="--engine-ready-timeout-s")
    ] = 600.0
    """Seconds without progress after which a start is given up: no bytes arrive, no weights are loaded,
    nothing is heard of other machines. The server then ends, and says which engine did not come up; a machine
    with --headless waits for its server without limit."""
    steps_ahead: Annotated[int | None, OptionDoc(SCHEDULER, least=0, most=4)] = None
    """Steps planned while one runs; --no-async-scheduling is 0. Default: 1; on a CPU only while text is
    generated, because prompts gain more from being computed together."""
    speculative_config: Annotated[dict[str, object] | None, OptionDoc(SCHEDULER, short="-sc")] = {}
    """Speculative decoding, where it is faster: tokens are proposed, and several verified in one step.
    {"method": "ngram"} is the default, others are "suffix", "draft_model" (docs/speculation.md). Answers stay
    the same to the bit. none turns it off."""

    @property
    def ranks(self) -> int:
        """The number of workers among which the model is divided."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def depth(self) -> int:
        """The most steps in flight: all stages of the model can work at the same time."""
        ahead = 1 if self.steps_ahead is None else self.steps_ahead
        return max(ahead + 1, self.pipeline_parallel_size)


def check_kept_blocks(config: EngineConfig) -> None:
    """Refuse options that contradict what is kept of the KV cache elsewhere, or mean nothing without it."""
    folder, memory = config.worker.kv_cache_dir, config.worker.kv_offloading_size
    if folder is None and config.worker.kv_cache_disk_gib is not None:
        raise ValueError("--kv-cache-disk-gib says how large --kv-cache-dir may get: give that, too")
    flag = "--kv-cache-dir" if memory is None else "--kv-offloading-size"
    if folder is None and memory is None:
        return
    if not config.enable_prefix_caching:
        raise ValueError(
            f"{flag} keeps what --no-enable-prefix-caching would never look for: leave out one of them"
        )


def cluster_key_needed(what: str) -> ValueError:
    """The error when `what`, an option by which machines join each other, is given without a secret."""
    return ValueError(f"{what} needs a secret that all machines share; {_KEY_REMEDY}")


def check_cluster_key(secret: str) -> None:
    """Refuse a secret that is short enough to be guessed."""
    if len(secret) < LEAST_KEY_CHARACTERS:
        raise ValueError(
            f"the cluster key has {len(secret)} characters, and {LEAST_KEY_CHARACTERS} at least are needed; "
            + _KEY_REMEDY
        )


class Address(msgspec.Struct, frozen=True, omit_defaults=True):
    """The two ZMQ endpoints at which one API server listens for its engines.

    They are sockets in the run's private folder, or TCP ports for other machines, which need a secret.
    """

    requests: str
    answers: str
    secret: str | None = None


class Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas that serve one model: how many, which of them run here, and where the others connect."""

    size: int = 1
    first: int = 0
    """The number of the first replica on this machine."""
    here: int = 1
    """The number of replicas on this machine."""
    together: bool = False
    """Whether they share experts, so that they run steps, end and start together."""
    apart: bool = False
    """Whether other machines have API servers of their own, to which their replicas belong."""
    by_ray: bool = False
    """Whether Ray runs those that are not on this machine, for processes here that start them again."""
    address: str = "127.0.0.1"
    """The address of the machine with the API servers."""
    port: int = 29550
    secret: str | None = None

    @property
    def local(self) -> range:
        return range(self.first, self.first + self.here)

    @property
    def started(self) -> range:
        """The numbers of the replicas that processes of this machine are, or have Ray run."""
        return range(self.size) if self.by_ray else self.local

    @property
    def follow_the_first(self) -> bool:
        """Whether those here share experts with the first one, on another machine, and leave with it."""
        return self.together and self.first > 0

    @property
    def elsewhere(self) -> bool:
        """Whether some replicas run on other machines."""
        return self.here < self.size and not self.apart

    @property
    def numbers(self) -> range:
        """The numbers of all replicas that requests may go to."""
        return self.local if self.apart else range(self.size)

    def tcp_address(self, server: int) -> Address:
        """The address at which an API server listens for engines of other machines."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        port = self.port + 2 * server
        return Address(f"tcp://{host}:{port}", f"tcp://{host}:{port + 1}", self.secret)


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine process learns from its parent at its start, through the pipe they share."""

    engine: EngineConfig
    servers: list[Address] = []
    replicas: Replicas = Replicas()
    index: int = 0
    """The number of this replica."""
    generation: int = 1
    """How many times it has been started: replicas that share experts meet at other paths each time."""
    label: str = ""
    """The name of its model, if the server has several."""
    most_cache_bytes: int | None = None
    """The most bytes of its caches where the operator does not say how many; None: as much as usual."""
    folder: str | None = None
    """A folder for files that workers share; it is private to the run and removed at its end."""
    progress_page: str = ""
    """The file in which the engine and its ranks on this machine show how their steps go on."""
    drain_seconds: float = 0.0
    """The time for which requests may run on after SIGTERM."""
    log_level: str = "info"
    debug_steps: bool = False
    """Whether the log names the parts of steps that take much longer than expected."""
    model_classes: dict[str, str] = {}
    """Classes that the starting program has registered: architecture -> "module:Class"."""
    search_path: list[str] = []
    """Folders in which that program looks for modules."""

    @property
    def alone(self) -> bool:
        """Whether there is no other replica."""
        return len(self.replicas.numbers) == 1

    @property
    def expert_replicas(self) -> int:
        """The number of replicas that share experts, this one among them."""
        return self.replicas.size if self.replicas.together else 1
