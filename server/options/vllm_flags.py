"""Flags of `vllm serve` that are known but not supported yet; they are refused by name, never ignored.

A flag leaves this table when it gets a meaning. Values that ask for what happens anyway are accepted, so that
existing start scripts keep working.
"""

from __future__ import annotations

import json

from server.options.reader import OptionError, VllmFlag

_SWITCHES = """
    skip-tokenizer-init enable-prompt-embeds enable-sleep-mode
    numa-bind enable-fault-tolerance enable-ssl-refresh enable-auto-tool-choice
    exclude-tools-when-tool-choice-none enable-lora fully-sharded-loras enable-per-request-metrics
    enable-log-outputs log-error-stack grpc enable-offline-docs language-model-only kv-cache-metrics
    enable-mfu-metrics enable-tokenizer-info-endpoint enable-scale-out disable-sliding-window
    disable-cascade-attn data-parallel-hybrid-lb data-parallel-external-lb calculate-kv-scales
"""

_VALUES: dict[str, tuple[str, ...]] = {
    "tokenizer-mode": ("auto", "hf"),
    "tokenizer-revision": (),
    "code-revision": (),
    "hf-token": (),
    "config-format": ("auto", "hf"),
    "quantization-config": (),
    "safetensors-load-strategy": ("lazy",),
    "ignore-patterns": (),
    "logprobs-mode": ("raw_logprobs",),
    "logits-processors": (),
    "io-processor-plugin": (),
    "renderer-num-workers": ("1",),
    "allowed-local-media-path": (),
    "allowed-media-domains": (),
    "prefix-caching-hash-algo": ("sha256", "sha256_cbor"),
    "kv-offloading-size": (),
    "kv-offloading-backend": ("native",),
    "cpu-offload-gb": ("0", "0.0"),
    "swap-space": ("0",),
    "max-num-partial-prefills": ("1",),
    "scheduler-cls": (),
    "watermark": ("0", "0.0"),
    "performance-mode": ("balanced",),
    "decode-context-parallel-size": ("1",),
    "prefill-context-parallel-size": ("1",),
    "data-parallel-rank": ("0",),
    "data-parallel-backend": ("mp",),
    "device-ids": (),
    "worker-cls": ("auto",),
    "worker-extension-cls": ("",),
    "fault-tolerance-config": (),
    "middleware": (),
    "tool-parser-plugin": (),
    "tool-server": (),
    "reasoning-parser-plugin": (),
    "lora-modules": (),
    "max-loras": ("1",),
    "max-lora-rank": ("16",),
    "max-cpu-loras": (),
    "lora-dtype": ("auto",),
    "lora-target-modules": (),
    "default-mm-loras": (),
    "max-log-len": (),
    "disable-access-log-for-endpoints": (),
    "fingerprint-mode": ("full",),
    "grpc-port": (),
    "speculative-config": (),
    "spec-method": (),
    "spec-model": (),
    "spec-tokens": (),
    "limit-mm-per-prompt": (),
    "mm-processor-cache-gb": ("0",),
    "mm-processor-kwargs": (),
    "collect-detailed-traces": (),
    "custom-histogram-buckets": (),
    "optimization-level": ("0", "O0"),
    "cudagraph-capture-sizes": (),
    "attention-backend": ("auto",),
    "profiler-config": (),
    "kv-transfer-config": (),
    "h11-max-incomplete-event-size": (),
    "h11-max-header-count": (),
}


class StructuredOutputsFlag(VllmFlag):
    """The flag with which vLLM chooses a grammar engine. There is one here, so every name means it."""

    def check(self, value: object) -> None:
        try:
            asked = json.loads(value) if isinstance(value, str) and value else value or {}
        except ValueError:
            raise OptionError(f"{self.flag} takes an object in JSON") from None
        if not isinstance(asked, dict):
            raise OptionError(f"{self.flag} takes an object in JSON")
        wrong = [name for name, each in asked.items() if name != "backend" and each not in (None, False, "")]
        if wrong:
            raise OptionError(
                f"{self.flag}: `{wrong[0]}` is not supported yet; requests can ask for it themselves"
            )


VLLM_FLAGS = [
    StructuredOutputsFlag("--structured-outputs-config"),
    VllmFlag("--guided-decoding-backend", harmless=True),
    VllmFlag("--compilation-config", ("0",), short="-cc"),
    *(VllmFlag(f"--{name}", neutral) for name, neutral in _VALUES.items()),
    *(VllmFlag(f"--{name}", is_switch=True) for name in _SWITCHES.split()),
    # Ranks reduce by torch.distributed alone, a prompt is admitted only if all of it fits, the load is always
    # counted, a rank reads its own experts alone: these flags change nothing.
    VllmFlag("--disable-custom-all-reduce", is_switch=True, harmless=True),
    VllmFlag("--scheduler-reserve-full-isl", is_switch=True, harmless=True),
    VllmFlag("--enable-server-load-tracking", is_switch=True, harmless=True),
    VllmFlag("--enable-ep-weight-filter", is_switch=True, harmless=True),
]
