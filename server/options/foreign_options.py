"""Flags and variables of other servers that are no options here: some have no meaning, some are refused.

What changes nothing is accepted, so that start scripts keep working, and the log names it at the start. What
asks for other answers, or has another name here, is refused with a sentence.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping

from server.options.option_parsing import Option, VllmFlag
from server.options.option_sources import is_kubernetes_link

_IDLE_SWITCHES = """
    aggregate-engine-logging allow-deprecated-quantization dcp-q-replicate disable-cascade-attn
    disable-custom-all-reduce disable-frontend-multiprocessing disable-log-requests
    disable-mm-preprocessor-cache disable-nccl-for-dp-synchronization enable-auto-tool-choice
    enable-batch-sharded-sampling enable-ep-weight-filter enable-flash-late-interaction
    enable-flashinfer-autotune enable-hc-sp enable-log-deltas enable-mamba-cache-stochastic-rounding
    enable-mamba-shared-prefix-checkpoint enable-mixed-moe-lora-format enable-reasoning
    enable-server-load-tracking enable-shm-tensor-arena fail-on-environ-validation interleave-mm-strings
    jit-monitor-verbose kv-sharing-fast-prefill long-prefill-token-threshold-adaptive
    mm-device-do-normalize scheduler-reserve-full-isl skip-mm-profiling sleep-mode-offload-cudagraph
    swa-bounded-replay use-fp64-gumbel use-replayssm use-tqdm-on-load
"""
_IDLE_VALUES = """
    attention-backend cp-kv-cache-interleave-size dcp-comm-backend dcp-kv-cache-interleave-size
    dp-sync-interval fingerprint-mode gdn-prefill-backend guided-decoding-backend ir-op-priority
    jit-monitor-mode kda-decode-backend kda-prefill-backend kv-cache-metrics-sample linear-backend
    mamba-backend mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds
    mamba-ssm-cache-dtype mamba-ssu-algorithm max-log-len max-long-partial-prefills max-lora-cls-labels
    max-num-partial-prefills max-parallel-loading-workers max-seq-len-to-capture mm-encoder-attn-backend
    mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin mm-encoder-tp-mode
    mm-hasher-algorithm mm-ipc-gpu-memory-gb mm-processor-cache-type mm-processor-device
    mm-shm-cache-max-object-size-mb mm-tensor-ipc moe-backend offload-backend offload-num-in-group
    offload-prefetch-step performance-mode prefill-schedule-interval prefix-cache-retention-interval
    prefix-caching-hash-algo prefix-match-unit pt-load-map-location renderer-num-workers
    replayssm-buffer-len safetensors-load-strategy safetensors-prefetch-block-size
    safetensors-prefetch-num-threads show-hidden-metrics-for-version sparse-indexer-topk-backend
    swap-space video-pruning-method video-pruning-rate watermark
"""
_IDLE_LISTS = "ignore-patterns offload-params sleep-preserve-parameter-names"
_IDLE_OBJECTS = "kernel-config structured-outputs-config"

_REFUSED_SWITCHES = """
    calculate-kv-scales cohere-is-reasoning-model cudagraph-metrics
    disable-sliding-window enable-cumem-allocator enable-dbo enable-fault-tolerance
    enable-layerwise-nvtx-tracing enable-mfu-metrics enable-moe-shared-loras enable-nccl-comm-suspend
    enable-offline-docs enable-return-routed-experts enable-scale-out enable-tower-connector-lora
    enable-trace-replay exclude-tools-when-tool-choice-none grpc kv-cache-metrics log-error-stack
    mm-encoder-only numa-bind ray-workers-use-nsight return-sampling-mask specialize-active-lora
    tokens-only
"""
_REFUSED_VALUES = """
    additional-config anthropic-disabled-thinking-effort aux-output-config cohere-format
    collect-detailed-traces cpu-distributed-timeout-seconds cpu-offload-params custom-histogram-buckets
    data-parallel-supervisor-port dbo-decode-token-threshold dbo-prefill-token-threshold default-mm-loras
    device-ids distributed-timeout-seconds dp-supervisor-probe-failure-threshold
    dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s ec-manager-config ec-transfer-config
    engram-config fault-tolerance-config fingerprint-value grpc-port kv-cache-dtype-skip-layers
    kv-events-config max-num-scheduled-tokens mm-encoder-fp8-scale-save-path model-class-overrides
    model-loader-extra-config numa-bind-cpus numa-bind-nodes quantization-config reasoning-config
    tool-server watermark-config weight-transfer-config
"""

_OTHER_SCHEDULER = (
    "is for classes of vLLM's scheduler, which plan other steps than engines here run: --scheduling-policy "
    "priority, `priority` of requests and `weight` of keys say who runs first"
)
_OTHER_WORKER = (
    "is for classes of vLLM's workers, which take other steps than those here: --worker-extension-cls adds "
    "methods to each worker, and --logits-processors change what is drawn"
)
_EXPERTS_STAY = "is not supported: experts stay on the ranks that loaded them"
_REPLICAS_STAY = "is not supported: the replicas are those of --data-parallel-size at the start"
_FIELDS_PASS = "is gone: unknown fields of requests are let through, and --strict-fields refuses them"
_INSTEAD = {
    "code-revision": "means nothing here: code that comes with a model is that of its --revision",
    "cudagraph-capture-sizes": "is one number here: --max-cudagraph-capture-size",
    "hf-token": "would be seen by all users of this machine: put it into the variable HF_TOKEN",
    "io-processor-plugin": "is not supported: let a program before the server make prompts of its data",
    "kv-cache-memory": "is --kv-cache-memory-bytes here",
    "logging-config": "is --log-config-file here, and --log-level",
    "max-num-active-seqs": "is --max-num-seqs here",
    "kv-transfer-config": "is for connectors, of which there are none here: --kv-offloading-size keeps "
    "prefixes of a card in the host's memory, --kv-cache-dir those of a CPU on disk",
    "num-speculative-tokens": "is --spec-tokens here",
    "override-pooler-config": "is --pooler-config here",
    "rope-scaling": "is --hf-overrides '{\"rope_scaling\": {...}}' here",
    "rope-theta": "is --hf-overrides.rope_theta here",
    "scheduler-cls": _OTHER_SCHEDULER,
    "speculative-model": "is --spec-model here",
}
"""Flags that are refused with what to use, those of older versions of vLLM among them."""
_INSTEAD_SWITCHES = {
    "enable-elastic-ep": _REPLICAS_STAY,
    "enable-eplb": _EXPERTS_STAY,
    "enable-per-request-metrics": "is --enable-timing here, or --enable-timing-headers",
    "guided-decoding-disable-any-whitespace": "is disable_any_whitespace in structured_outputs of requests",
}
_CACHES = "is not supported: each worker of --tensor-parallel-size caches all tokens for its own heads"

VLLM_FLAGS = [
    *(VllmFlag(f"--{name}", is_switch=True, is_idle=True) for name in _IDLE_SWITCHES.split()),
    *(VllmFlag(f"--{name}", is_idle=True) for name in _IDLE_VALUES.split()),
    *(VllmFlag(f"--{name}", is_object=True, is_idle=True) for name in _IDLE_OBJECTS.split()),
    VllmFlag("--attention-config", short="-ac", is_object=True, is_idle=True),
    VllmFlag("--compilation-config", short="-cc", is_object=True, is_idle=True),
    VllmFlag("--optimization-level", short="-O", is_idle=True),
    *(VllmFlag(f"--{name}", is_list=True, is_idle=True) for name in _IDLE_LISTS.split()),
    *(VllmFlag(f"--{name}", is_switch=True) for name in _REFUSED_SWITCHES.split()),
    *(VllmFlag(f"--{name}", is_object=name.endswith("config")) for name in _REFUSED_VALUES.split()),
    *(
        VllmFlag(f"--{name}", instead=said, is_list="sizes" in name, is_object=name.endswith("config"))
        for name, said in _INSTEAD.items()
    ),
    VllmFlag("--data-parallel-multi-port-external-lb", short="-dpm", is_switch=True),
    VllmFlag("--diffusion-config", short="-dc", is_object=True),
    VllmFlag("--elastic-ep-max-dp-size", instead=_REPLICAS_STAY),
    *(VllmFlag(f"--{name}", instead=said, is_switch=True) for name, said in _INSTEAD_SWITCHES.items()),
    VllmFlag("--eplb-config", instead=_EXPERTS_STAY, is_gone=True),
    VllmFlag("--ignore-unknown-fields", is_switch=True, instead=_FIELDS_PASS, is_gone=True),
    VllmFlag("--cpu-offload-gb", neutral=("0", "0.0")),
    VllmFlag("--offload-group-size", neutral=("0",)),
    VllmFlag("--kv-offloading-backend", neutral=("native",), instead="has no other backend"),
    VllmFlag("--worker-cls", neutral=("auto",), instead=_OTHER_WORKER),
    VllmFlag("--decode-context-parallel-size", short="-dcp", neutral=("1",), instead=_CACHES),
    VllmFlag("--prefill-context-parallel-size", short="-pcp", neutral=("1",), instead=_CACHES),
]

_LLAMA_SWITCHES = "jinja cont-batching mmap mlock embeddings embedding reranking rerank webui slots metrics"
_LLAMA_NAMES = {
    ("--alias", "-a"): "--served-model-name",
    ("--batch-size", "-b"): "--max-num-batched-tokens",
    ("--cache-type-k", "-ctk"): "--kv-cache-dtype, int8 in place of q8_0,",
    ("--cache-type-v", "-ctv"): "--kv-cache-dtype, int8 in place of q8_0,",
    ("--chat-template-file", None): "--chat-template",
    ("--ctx-size", "-c"): "--max-model-len",
    ("--hf-file", "-hff"): "--quant, which names the form of the file, such as Q4_K_M,",
    ("--hf-repo", "-hf"): "MODEL, without a flag,",
    ("--lora", None): "--lora-modules name=folder, of PEFT,",
    ("--model-draft", "-md"): "--spec-model, with --spec-method draft_model,",
    ("--parallel", "-np"): "--max-num-seqs",
    ("--n-predict", None): "max_tokens of requests",
    ("--predict", None): "max_tokens of requests",
    ("--rope-freq-base", None): "--hf-overrides.rope_theta",
    ("--split-mode", "-sm"): "--tensor-parallel-size, or --pipeline-parallel-size,",
    ("--temp", None): "--override-generation-config.temperature, or temperature of requests,",
    ("--tensor-split", "-ts"): "--tensor-parallel-size",
    ("--threads", "-t"): "--cpu-threads",
    ("--ubatch-size", "-ub"): "--max-num-batched-tokens",
    ("-m", None): "MODEL, without a flag,",
}

LLAMA_FLAGS = [
    *(VllmFlag(f"--{name}", is_switch=True, is_idle=True) for name in _LLAMA_SWITCHES.split()),
    VllmFlag("--n-gpu-layers", short="-ngl", is_idle=True),
    VllmFlag("--flash-attn", short="-fa", is_idle=True),
    *(VllmFlag(flag, short=short, instead=f"is {own} here") for (flag, short), own in _LLAMA_NAMES.items()),
]
"""Flags of llama.cpp's server."""

OBEYED = {
    "VLLM_API_KEY": "api_key",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "timeout_keep_alive",
    "VLLM_LOGGING_LEVEL": "uvicorn_log_level",
    "VLLM_LOGGING_CONFIG_PATH": "log_config_file",
    "VLLM_SERVER_DEV_MODE": "server_dev_mode",
    "VLLM_CPU_KVCACHE_SPACE": "kv_cache_memory_bytes",
    "VLLM_ALL2ALL_BACKEND": "all2all_backend",
    "VLLM_TORCH_PROFILER_DIR": "profiler_config",
    "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB": "max_media_mb",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "allow_runtime_lora",
    "VLLM_ENGINE_READY_TIMEOUT_S": "engine_ready_timeout",
}
"""Variables of vLLM, and the options that they give where nothing else does."""
_WRITTEN: Mapping[str, Callable[[str], str | list[str]]] = {
    "VLLM_API_KEY": lambda text: [text.strip()] if text.strip() else [],  # a secret's file has a line's end
    "VLLM_CPU_KVCACHE_SPACE": lambda text: "" if text in ("", "0") else f"{text}GiB",
    "VLLM_TORCH_PROFILER_DIR": lambda text: (
        json.dumps({"profiler": "torch", "torch_profiler_dir": text}) if text else ""
    ),
}
"""Values as options are written, where they differ; empty is what an option that is not given does."""

PLUGINS = "VLLM_PLUGINS"
"""The variable that names the installed plug-ins to call, which is obeyed where they are loaded."""


def read_variables(
    options: Mapping[str, Option], environ: Mapping[str, str], notes: list[str]
) -> dict[str, object]:
    """Read vLLM's variables; `notes` gets sentences on those that are obeyed, and on the others.

    `options`: by their fields. Raises OptionError on a value that cannot be obeyed.
    """
    found: dict[str, object] = {}
    obeyed: list[str] = []
    idle: list[str] = []
    for name, text in sorted(environ.items()):
        if not name.startswith("VLLM_") or is_kubernetes_link(name, text) or name == PLUGINS:
            continue
        field = OBEYED.get(name)
        if field is None:
            idle.append(name)
        elif written := _WRITTEN.get(name, str)(text):
            found[field] = options[field].value(written, f"environment variable {name}")
            obeyed.append(f"{name} as {options[field].flag}")
    if obeyed:
        notes.append(f"variables of vLLM are obeyed: {', '.join(obeyed)}")
    if idle:
        notes.append(f"variables of vLLM without meaning here: {', '.join(map(_with_meant, idle))}")
    return found


def _with_meant(name: str) -> str:
    """The name, with the variable that was probably meant."""
    near = difflib.get_close_matches(name, OBEYED, n=1, cutoff=0.9)
    return f"{name} (did you mean {near[0]}?)" if near else name
