"""Flags of llama.cpp's server: those with another name here, and what is said of others."""

from __future__ import annotations

from collections.abc import Sequence

from server.options.option_table import OptionError, VllmFlag

_SAME = {
    "-m": "--model",
    "-hf": "--model",
    "-hfr": "--model",
    "--hf-repo": "--model",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-t": "--cpu-threads",
    "--threads": "--cpu-threads",
    "--gpu-layers": "--n-gpu-layers",
    "--chat-template-file": "--chat-template",
}
"""Names of llama.cpp's, and those that the options have here."""


def translated(arguments: Sequence[str]) -> list[str]:
    """Give flags of llama.cpp the names that they have here; `-c 0` is the model's own length."""
    words = list(arguments)
    for index, (name, equals, value) in enumerate(word.partition("=") for word in arguments):
        if (flag := _SAME.get(name.replace("_", "-"))) is not None:
            words[index] = flag + equals + value
            if flag == "--max-model-len" and value == "0":
                words[index] = f"{flag}=auto"
            elif flag == "--max-model-len" and words[index + 1 : index + 2] == ["0"]:
                words[index + 1] = "auto"
    return words


class GpuLayersFlag(VllmFlag):
    """The flag that divides layers between a card and the host, which is done with all or with none here."""

    def check(self, value: object) -> None:
        if value == "0":
            raise OptionError("-ngl 0 is --device cpu here")


_ONE_DEVICE = "all layers are on one device, a card if there is one (--device)"
_SO_ANYWAY = "it is so anyway"
_SWITCHES = "jinja cont-batching mmap mlock embeddings embedding reranking rerank webui slots metrics"
_INSTEAD = {
    ("--batch-size", "-b"): "is --max-num-batched-tokens here",
    ("--ubatch-size", "-ub"): "is --max-num-batched-tokens here",
    ("--cache-type-k", "-ctk"): "is --kv-cache-dtype here, for keys and values: int8 in place of q8_0",
    ("--cache-type-v", "-ctv"): "is --kv-cache-dtype here, for keys and values: int8 in place of q8_0",
    ("--hf-file", "-hff"): "is --quant here, which names the form of the file, such as Q4_K_M",
    ("--model-draft", "-md"): "is --spec-model here, with --spec-method draft_model",
    ("--tensor-split", "-ts"): "is --tensor-parallel-size here: cards have equal shares",
    ("--split-mode", "-sm"): "is --tensor-parallel-size here for row, --pipeline-parallel-size for layer",
    ("--predict", None): "is a matter of requests here: max_tokens",
    ("--n-predict", None): "is a matter of requests here: max_tokens",
    ("--temp", None): "is --override-generation-config.temperature here, or temperature in requests",
    ("--lora", None): "is --lora-modules name=folder here, for adapters of PEFT",
    ("--rope-freq-base", None): "is --hf-overrides.rope_theta here",
}

LLAMA_FLAGS = [
    GpuLayersFlag("--n-gpu-layers", short="-ngl", why=_ONE_DEVICE),
    VllmFlag("--flash-attn", ("on", "auto", "1"), short="-fa", why=_SO_ANYWAY),
    *(VllmFlag(f"--{name}", is_switch=True, why=_SO_ANYWAY) for name in _SWITCHES.split()),
    *(VllmFlag(flag, short=short, instead=said) for (flag, short), said in _INSTEAD.items()),
]
