"""Flags of `vllm serve` that are no options here: most are refused by name, and some change nothing.

A flag leaves these tables when it gets a meaning. One that asks for what happens anyway is accepted, so that
start scripts keep working; what changes nothing is said at the start, and listed in docs/options.md.
"""

from __future__ import annotations

import json

from server.options.option_table import OptionError, VllmFlag, asks_for_nothing

_SWITCHES = """
    enable-nccl-comm-suspend
    enable-cumem-allocator numa-bind enable-fault-tolerance
    exclude-tools-when-tool-choice-none enable-log-outputs log-error-stack
    grpc enable-offline-docs kv-cache-metrics cudagraph-metrics enable-mfu-metrics
    enable-layerwise-nvtx-tracing
    enable-scale-out disable-sliding-window data-parallel-multi-port-external-lb calculate-kv-scales
    ray-workers-use-nsight mm-encoder-only tokens-only enable-return-routed-experts
    specialize-active-lora enable-trace-replay return-sampling-mask
"""

_VALUES = """
    quantization-config model-loader-extra-config model-class-overrides
    kv-cache-dtype-skip-layers cpu-offload-params
    max-num-scheduled-tokens distributed-timeout-seconds cpu-distributed-timeout-seconds
    numa-bind-nodes numa-bind-cpus device-ids fault-tolerance-config
    tool-server reasoning-config default-mm-loras grpc-port
    collect-detailed-traces custom-histogram-buckets
    kv-events-config ec-transfer-config weight-transfer-config additional-config
"""

_NEUTRAL_VALUES: dict[str, tuple[str, ...]] = {
    "ignore-patterns": ("original/**/*",),
    "logprobs-mode": ("raw_logprobs",),
    "renderer-num-workers": ("1",),
    "cpu-offload-gb": ("0", "0.0"),
    "offload-backend": ("auto",),
    "max-num-partial-prefills": ("1",),
    "max-long-partial-prefills": ("1",),
    "watermark": ("0", "0.0"),
    "performance-mode": ("balanced",),
    "fingerprint-mode": ("full",),
}
"""Values that ask for what happens anyway, of flags that are refused otherwise."""

_DIGITS = "has nothing to choose: states are float32 here"
_STATES = [
    VllmFlag("--mamba-cache-dtype", ("auto", "float32"), instead=_DIGITS),
    VllmFlag("--mamba-ssm-cache-dtype", ("auto", "float32"), instead=_DIGITS),
    VllmFlag("--enable-mamba-cache-stochastic-rounding", is_switch=True, instead=_DIGITS),
    VllmFlag(
        "--mamba-cache-mode",
        ("none", "align"),
        instead="has nothing to choose: states are remembered where conversations go on, as many as "
        "--state-snapshots says",
    ),
    VllmFlag("--mamba-block-size", instead="is --block-size here: states are remembered behind full blocks"),
]
"""Flags about the states of hybrids."""

_ON_DISK = (
    "give --kv-offloading-size to keep prefixes of a card in the host's memory, or --kv-cache-dir to keep "
    "those of a CPU on disk, where they are found again after a restart"
)
_OFFLOADED = [
    VllmFlag("--kv-offloading-backend", ("native",), instead=f"has no other backend: {_ON_DISK}"),
    VllmFlag(
        "--kv-transfer-config",
        is_object=True,
        instead=f"is for connectors such as LMCache's, of which there are none here: {_ON_DISK}",
    ),
]
"""Flags that keep blocks of the KV cache outside of it."""

_INSTEAD = {
    "override-pooler-config": "is now --pooler-config",
    "rope-scaling": "is a part of the model's config.json: give --hf-overrides '{\"rope_scaling\": {...}}'",
    "rope-theta": "is a part of the model's config.json: give --hf-overrides.rope_theta",
    "kv-cache-memory": "is written out here: --kv-cache-memory-bytes",
    "speculative-model": "is now --spec-model, or `model` in --speculative-config",
    "num-speculative-tokens": "is now --spec-tokens, or `num_speculative_tokens` in --speculative-config",
    "code-revision": "means nothing here: code that comes with a model is that of its --revision",
    "hf-token": "would be seen by all users of this machine: put it into the variable HF_TOKEN",
    "cudagraph-capture-sizes": "is one number here: --max-cudagraph-capture-size",
    "enable-per-request-metrics": "is --enable-timing here, or --enable-timing-headers",
    "guided-decoding-disable-any-whitespace": "is a matter of requests here: whitespace_pattern in "
    "structured_outputs",
}
"""Flags with another name here, those of older versions of vLLM among them, and what to use."""

_SO_ANYWAY = "it is so anyway"
_ONE_WAY_TO_LOAD = "weights are loaded in one way"
_ONE_WAY_OF_MEDIA = "media are prepared and encoded in one way"
_NO_TUNING = "there is no compiler to tune, and one set of kernels"

_IDLE_SWITCHES = {
    _SO_ANYWAY: """
        enable-auto-tool-choice enable-reasoning disable-log-requests disable-frontend-multiprocessing
        disable-custom-all-reduce scheduler-reserve-full-isl enable-server-load-tracking
        enable-ep-weight-filter disable-cascade-attn disable-nccl-for-dp-synchronization
        aggregate-engine-logging fail-on-environ-validation
    """,
    _NO_TUNING: "enable-flashinfer-autotune kv-sharing-fast-prefill",
    _ONE_WAY_TO_LOAD: "use-tqdm-on-load",
    _ONE_WAY_OF_MEDIA: "disable-mm-preprocessor-cache skip-mm-profiling interleave-mm-strings",
    "no texts are logged": "enable-log-deltas",
}
_IDLE_VALUES = {
    _SO_ANYWAY: "show-hidden-metrics-for-version",
    _NO_TUNING: """
        attention-backend moe-backend linear-backend attention-config kernel-config ir-op-priority
        max-seq-len-to-capture
    """,
    _ONE_WAY_TO_LOAD: """
        safetensors-load-strategy safetensors-prefetch-num-threads safetensors-prefetch-block-size
        pt-load-map-location max-parallel-loading-workers
    """,
    _ONE_WAY_OF_MEDIA: """
        mm-processor-cache-type mm-shm-cache-max-object-size-mb mm-hasher-algorithm mm-encoder-tp-mode
        mm-encoder-attn-backend mm-tensor-ipc mm-processor-device video-pruning-rate
    """,
    "no texts are logged": "max-log-len",
    "there is one grammar engine": "guided-decoding-backend",
    "preempted requests are computed again, and not swapped": "swap-space",
}
"""Why flags change nothing here, whatever they say, and these flags."""


class StructuredOutputsFlag(VllmFlag):
    """The flag with which vLLM chooses a grammar engine. There is one here, so every name means it."""

    def check(self, value: object) -> None:
        for name, each in _object(self.flag, value).items():
            if name == "reasoning_parser" and each:
                raise OptionError(f"{self.flag}: `{name}` is an option of its own, --reasoning-parser")
            if name != "backend" and not asks_for_nothing(each):
                raise OptionError(
                    f"{self.flag}: `{name}` is not supported yet; requests can ask for it themselves"
                )


class CompilationFlag(VllmFlag):
    """The flag with which vLLM tunes its compiler, which is not needed here, and its CUDA graphs."""

    def check(self, value: object) -> None:
        if str(value).isdecimal():
            return
        for name, each in _object(self.flag, value).items():
            if name == "cudagraph_mode" and str(each).upper() in ("NONE", "0"):
                raise OptionError(f"{self.flag}: `{name}` NONE is --enforce-eager here")
            if name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size") and each:
                raise OptionError(f"{self.flag}: `{name}` is --max-cudagraph-capture-size here")


def _object(flag: str, value: object) -> dict[str, object]:
    if asks_for_nothing(value):
        return {}
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise OptionError(f"{flag} takes an object in JSON")
    return found


_OTHER_CONTRACT = (
    "the scheduler and the workers here speak another protocol than those of vLLM, for which such a class is "
    "written; --logits-processors and --worker-extension-cls run code in a worker"
)

_SWITCHES_INSTEAD = ("enable-per-request-metrics", "guided-decoding-disable-any-whitespace")
_OBJECTS = (
    "attention-config",
    "kernel-config",
)
_LISTS = ("cudagraph-capture-sizes", "ignore-patterns")

VLLM_FLAGS = [
    StructuredOutputsFlag(
        "--structured-outputs-config",
        is_object=True,
        why="there is one grammar engine, whatever `backend` says",
    ),
    CompilationFlag("--compilation-config", short="-cc", is_object=True, why=_NO_TUNING),
    VllmFlag("--optimization-level", short="-O", why=_NO_TUNING),
    VllmFlag(
        "--prefix-caching-hash-algo",
        ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
        why="prefixes are hashed by BLAKE2b",
        instead="has no such algorithm",
    ),
    VllmFlag("--scheduler-cls", instead=f"is not supported: {_OTHER_CONTRACT}"),
    VllmFlag("--worker-cls", ("auto",), instead=f"is not supported: {_OTHER_CONTRACT}"),
    *_STATES,
    *_OFFLOADED,
    *(
        VllmFlag(f"--{name}", neutral, is_object=name in _OBJECTS, is_list=name in _LISTS)
        for name, neutral in (dict.fromkeys(_VALUES.split(), ()) | _NEUTRAL_VALUES).items()
    ),
    *(VllmFlag(f"--{name}", is_switch=True) for name in _SWITCHES.split()),
    *(
        VllmFlag(f"--{name}", instead=said, is_switch=name in _SWITCHES_INSTEAD, is_list=name in _LISTS)
        for name, said in _INSTEAD.items()
    ),
    *(
        VllmFlag(f"--{name}", is_switch=True, why=why)
        for why, names in _IDLE_SWITCHES.items()
        for name in names.split()
    ),
    *(
        VllmFlag(f"--{name}", is_object=name in _OBJECTS, why=why)
        for why, names in _IDLE_VALUES.items()
        for name in names.split()
    ),
]
