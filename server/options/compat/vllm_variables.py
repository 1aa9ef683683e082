"""Variables by which deployments configure vLLM: obeyed, or said at the start to have no meaning here."""

from __future__ import annotations

import difflib
import fnmatch
import json
from collections.abc import Mapping

from server.options.option_sources import is_kubernetes_link
from server.options.option_table import Option

_PREFIX = "VLLM_"

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
    "VLLM_LORA_RESOLVER_CACHE_DIR": "lora_dir",
    "VLLM_LORA_RESOLVER_HF_REPO_LIST": "lora_repos",
}
"""Variables, and the options that they give where nothing else does."""

RESOLVERS = {
    "lora_filesystem_resolver": "VLLM_LORA_RESOLVER_CACHE_DIR",
    "lora_hf_hub_resolver": "VLLM_LORA_RESOLVER_HF_REPO_LIST",
}
"""Plug-ins that are --lora-resolver here, and the variables that say where they look."""

READ_ELSEWHERE = {"VLLM_PLUGINS": "installed plug-ins that are called (docs/plugins.md)"}
"""Variables that are obeyed where they are read, and what they name."""

WITHOUT_MEANING = {
    "it is so anyway": """
        KEEP_ALIVE_ON_ENGINE_DEATH NO_USAGE_STATS DO_NOT_TRACK USAGE_* ENABLE_V1_MULTIPROCESSING
        BATCH_INVARIANT WORKER_MULTIPROC_METHOD NO_DEPRECATION_WARNING COMPUTE_NANS_IN_LOGITS
    """,
    "there is one set of kernels, and one version of the engine": """
        ATTENTION_BACKEND USE_* FLASH_ATTN_* FLASHINFER_* DISABLE_FLASHINFER_* DEEP_GEMM_* DEEPEP_* MARLIN_*
        MOE_* FUSED_MOE_* ENABLE_FUSED_MOE_* ROCM_* XPU_* TPU_* XLA_* CUDA_* CUDART_* NCCL_* NVFP4_* MXFP4_*
        MLA_* KV_CACHE_LAYOUT DISABLED_KERNELS SKIP_P2P_CHECK V0_* V1_* CPU_MOE_PREPACK CPU_SGL_KERNEL
        LORA_DISABLE_* LORA_ENABLE_*
        CPU_INT4_W4A8 CPU_ATTN_* FLOAT32_MATMUL_PRECISION ALLREDUCE_* SLEEP_WHEN_IDLE TARGET_DEVICE TEST_*
    """,
    "nothing is compiled for a model": "CACHE_ROOT CONFIG_ROOT DISABLE_COMPILE_* ENABLE_STARTUP_*",
    "processes find each other here without it; --host, --port and --master-addr are options": """
        HOST_IP PORT LOOPBACK_IP RPC_* MQ_* RINGBUFFER_* RAY_* MSGPACK_* ENGINE_* EXECUTE_* ALLOW_INSECURE_*
        SHM_* LOOP_* V2_*
    """,
    "--cpu-threads says how many threads compute": "CPU_OMP_THREADS_BIND CPU_NUM_OF_RESERVED_CPU",
    "replicas are placed by --data-parallel-size and its kin": "DP_* RANDOMIZE_DP_*",
    "--media-seconds bounds the time of all media, and docs/limits.md has the other bounds": """
        IMAGE_FETCH_TIMEOUT VIDEO_FETCH_TIMEOUT AUDIO_FETCH_TIMEOUT MEDIA_* MM_* VIDEO_* MAX_IMAGE_PIXELS
        MAX_AUDIO_* MAX_EMBED_* MAX_N_SEQUENCES MAX_COMPLETION_PROMPTS MAX_STOP_STRINGS MAX_NUM_BAD_WORDS
        MAX_BAD_WORDS_TOTAL_TOKENS CHAT_TEMPLATE_* REGEX_* XGRAMMAR_* TOOL_PARSE_* ASSETS_CACHE
    """,
    "models come from folders and from the hub of Hugging Face, and their length from --max-model-len": """
        USE_MODELSCOPE MODEL_REDIRECT_PATH ALLOW_LONG_MAX_MODEL_LEN PP_LAYER_PARTITION
    """,
    "connectors of caches are not there yet": "NIXL_* MOONCAKE_* KV_*",
    "plug-ins are named by options (docs/plugins.md)": "LOGITS_PROCESSOR_THREADS",
    "it is not offered": """
        CONFIGURE_LOGGING SKIP_MODEL_NAME_VALIDATION ENABLE_RESPONSES_API_STORE TRACE_FUNCTION LOG_* LOGGING_*
        DEBUG_* GPT_OSS_*
    """,
}
"""Why variables have no meaning here, and their names behind VLLM_, some of which stand for several."""

_REASON_OF = {_PREFIX + name: why for why, names in WITHOUT_MEANING.items() for name in names.split()}


def read_variables(
    options: Mapping[str, Option], environ: Mapping[str, str], notes: list[str]
) -> dict[str, object]:
    """Read vLLM's variables; `notes` gets a sentence on those that are obeyed, and on each group of others.

    `options`: by their fields. Raises OptionError on a value that cannot be obeyed.
    """
    found: dict[str, object] = {}
    obeyed: list[str] = []
    idle: dict[str, list[str]] = {}
    unlooked = [variable for plugin, variable in RESOLVERS.items() if not _is_on(plugin, environ)]
    for name, text in sorted(environ.items()):
        if not name.startswith(_PREFIX) or is_kubernetes_link(name, text):
            continue
        if name in unlooked:
            idle.setdefault(_UNLOOKED, []).append(name)
        elif (field := OBEYED.get(name)) is not None:
            if written := _written(name, text):
                found[field] = options[field].value(written, f"environment variable {name}")
                obeyed.append(f"{name} as {options[field].flag}")
        elif name in READ_ELSEWHERE:
            obeyed.append(f"{name} as {READ_ELSEWHERE[name]}")
        elif why := _why_idle(name):
            idle.setdefault(why, []).append(name)
        else:
            notes.append(
                f"{name} is no variable that vLLM is known to have, and changes nothing{_meant(name)}"
            )
    if found.keys() & _PLACES:
        found["lora_resolver"] = True
    if obeyed:
        notes.append(f"variables of vLLM are obeyed: {', '.join(obeyed)}")
    notes += [f"{', '.join(names)}: without meaning here, because {why}" for why, names in idle.items()]
    return found


_PLACES = {OBEYED[variable] for variable in RESOLVERS.values()}
_UNLOOKED = (
    "adapters are looked for with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 alone, and if VLLM_PLUGINS, where it is "
    "set, names the plug-in that does it"
)


def _is_on(plugin: str, environ: Mapping[str, str]) -> bool:
    """Whether vLLM would look for adapters by one of its plug-ins."""
    allowed = environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").strip().lower() in ("1", "true")
    named = environ.get("VLLM_PLUGINS")
    return allowed and (named is None or plugin in [each.strip() for each in named.split(",")])


def _why_idle(name: str) -> str | None:
    """Why a variable has no meaning here; None if it is not known."""
    matching = (why for each, why in _REASON_OF.items() if fnmatch.fnmatch(name, each))
    return _REASON_OF.get(name) or next(matching, None)


def _written(name: str, text: str) -> str | list[str]:
    """The value as its option is written; empty if it asks for what an option that is not given does."""
    match name:
        case "VLLM_API_KEY":
            return [text] if text else []
        case "VLLM_CPU_KVCACHE_SPACE":
            return "" if text in ("", "0") else f"{text}GiB"
        case "VLLM_TORCH_PROFILER_DIR":
            return json.dumps({"profiler": "torch", "torch_profiler_dir": text}) if text else ""
        case "VLLM_LORA_RESOLVER_CACHE_DIR" | "VLLM_LORA_RESOLVER_HF_REPO_LIST":
            return [part.strip() for part in text.split(",") if part.strip()]
        case "VLLM_LOGGING_LEVEL":
            return text.lower()
        case _:
            return text


def _meant(name: str) -> str:
    known = [*OBEYED, *READ_ELSEWHERE, *(each for each in _REASON_OF if "*" not in each)]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else ""
