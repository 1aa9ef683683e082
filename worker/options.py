"""Options of a worker, and what any option declares beside its name, type and default.

An option is a field of a frozen struct whose annotation holds an `OptionDoc`. The floors above declare theirs
in the same way, and `server.options` reads all of them. This module imports nothing heavy, because
`serve --help` imports it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from worker.option_groups import ADAPTERS, MEMORY, MODEL, PLUGINS, SCHEDULER


@dataclass(frozen=True)
class OptionDoc:
    """Metadata of a field that the operator may set. The string below the field says what it is."""

    group: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    read: Callable[[str], object] | None = None
    """A function that reads the written form, if the field's type does not say how."""
    short: str = ""
    """A second flag."""
    repeats: bool = False
    """Whether the flag of a list may be given several times."""
    others: Callable[[str], bool] | None = None
    """A function that says whether a value may be given that is none of the choices."""
    is_secret: bool = False
    """Whether the value is a secret or leads to one, and is shown to nobody."""


_SIZE = re.compile(r"([\d.]+)\s*([kmgtKMGT]?)(i?[bB])?")


def size(text: str) -> int:
    """Read 32k as 32000 and 32K as 32768, as vLLM does; likewise m, g and t, and KiB, GB and the like."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 4096, 32k (thousands) or 4G (binary)")
    number, unit, suffix = match.groups()
    decimal = unit.islower() or (suffix in ("B", "b") and unit.isupper() and len(suffix or "") == 1)
    power = " kmgt".index(unit.lower()) if unit else 0
    exact = float(number) * (1000 if decimal else 1024) ** power
    if exact != int(exact):
        raise ValueError(f"{text!r} is not a whole number")
    return int(exact)


def share_or_size(text: str) -> float:
    """Read a share, 0.5 or 50%, as a number up to 1, and a size as `size` does."""
    if percent := re.fullmatch(r"(\d*\.?\d+)%", text):
        share = float(percent[1]) / 100
    elif re.fullmatch(r"[01]?\.\d+|[01]", text):
        share = float(text)
    else:
        share = -1.0
        with suppress(ValueError):
            return float(size(text))
    if not 0 < share <= 1:
        raise ValueError(f"{text!r} is not a share: write 0.5 or 50%, or a size such as 2.5G")
    return share


def _max_model_len(text: str) -> int | None:
    return None if text in ("-1", "auto") else size(text)


def _dtype(text: str) -> str:
    name = text.removeprefix("torch.")
    return {"half": "float16", "float": "float32"}.get(name, name)


def _load_format(name: str) -> str:
    """Refuse vLLM's formats that mean nothing here, with the way out; some names mean another one."""
    if name in _STREAMED:
        raise ValueError(
            f"{name} is not supported: copy the files to a disk of this machine and leave the option out; "
            "they are mapped, so each worker reads its own pieces alone"
        )
    return {"npcache": "pt", "hf": "auto"}.get(name, name)


def _has_loader(name: str) -> bool:
    from models.plugins import model_loader  # few name such a format

    return model_loader(name) is not None


_STREAMED = (
    *("runai_streamer", "runai_streamer_sharded", "tensorizer", "fastsafetensors", "instanttensor"),
    *("modelexpress", "sharded_state"),
)
"""vLLM's ways to read from other machines, past the system's cache of files, or files for each rank."""


class LoraOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of adapters (docs/adapters.md)."""

    enable_lora: Annotated[bool, OptionDoc(ADAPTERS)] = False
    """Let requests name adapters of the model; --lora-modules says so, too."""
    max_loras: Annotated[int | None, OptionDoc(ADAPTERS, least=1, most=1024)] = None
    """Maximum number of different adapters in a step. Default: 8, or --max-cpu-loras if that is less; vLLM's
    is 1."""
    max_cpu_loras: Annotated[int | None, OptionDoc(ADAPTERS, least=1, most=65536)] = None
    """Maximum number of adapters that a worker holds; others are loaded again when they are requested.
    Default: 32, or --max-loras if that is more."""
    max_lora_rank: Annotated[int, OptionDoc(ADAPTERS, least=1, most=65536)] = 16
    """Largest rank of an adapter. None takes more memory than its own rank needs."""
    lora_dtype: Annotated[
        str, OptionDoc(ADAPTERS, ("auto", "bfloat16", "float16", "float32"), read=_dtype)
    ] = "auto"
    """Number format of adapters; auto is the model's."""
    fully_sharded_loras: Annotated[bool, OptionDoc(ADAPTERS)] = False
    """With --tensor-parallel-size, cut the first matrices of adapters, too: less to compute for each worker,
    and more to send."""
    lora_target_modules: Annotated[list[str], OptionDoc(ADAPTERS)] = []
    """The only modules that adapters may change, by the last part of their names, such as q_proj. An adapter
    of others is refused."""

    @property
    def most(self) -> int:
        """The most adapters that a worker holds."""
        return max(32, self.max_loras or 0) if self.max_cpu_loras is None else self.max_cpu_loras

    @property
    def most_in_step(self) -> int:
        """The most different adapters in a step."""
        return min(8, self.most) if self.max_loras is None else self.max_loras

    def check(self) -> None:
        """Raises ValueError if the options contradict each other, or change nothing."""
        if self.most < self.most_in_step:
            raise ValueError(f"max_cpu_loras ({self.most}) must be >= max_loras ({self.most_in_step})")
        given = [
            name for name in self.__struct_fields__ if getattr(self, name) != getattr(LoraOptions(), name)
        ]
        if given and not self.enable_lora:
            flag = given[0].replace("_", "-")
            raise ValueError(f"--{flag} is for adapters: give --enable-lora, too, or --lora-modules")


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an operator may ask of a worker. None means that the device and the model decide."""

    trust_remote_code: Annotated[bool, OptionDoc(MODEL)] = False
    """Run Python code that comes with the model."""
    load_format: Annotated[
        str,
        OptionDoc(
            MODEL,
            (
                "auto",
                "safetensors",
                "pt",
                "npcache",
                "gguf",
                "mistral",
                "bitsandbytes",
                "dummy",
            ),
            read=_load_format,
            others=_has_loader,
        ),
    ] = "auto"
    """Form of the weights: safetensors, pt (*.bin, read as tensors alone, without running what they hold;
    npcache is the same), gguf and mistral (those files, also beside others), bitsandbytes (checks that they
    are), random ones (dummy), or what a loader is registered for (docs/plugins.md)."""
    model_impl: Annotated[str, OptionDoc(MODEL, ("auto", "facet", "vllm", "transformers"))] = "auto"
    """Our own model code, or that of transformers."""
    dtype: Annotated[str, OptionDoc(MODEL, ("auto", "bfloat16", "float16", "float32"), read=_dtype)] = "auto"
    """Number format; auto is the checkpoint's, but on a CPU files in float16 are served in bfloat16, and on
    CUDA those in float32 in 16 bits: float16 for vectors and scores, bfloat16 for text. Also: half, float."""
    quantization: Annotated[
        str | None,
        OptionDoc(
            MODEL,
            (
                *("int8", "int8-dynamic", "int4", "gptq", "gptq_marlin", "awq", "awq_marlin"),
                *("auto-round", "fp8", "fbgemm_fp8", "mxfp4", "compressed-tensors", "gguf"),
                *("bitsandbytes", "modelopt", "modelopt_fp4"),
            ),
            short="-q",
        ),
    ] = None
    """Quantize the weights of linear layers while loading. On the CPU: int8 or int4 weights, or int8 weights
    and activations (int8-dynamic), of checkpoints that are not quantized or have 8 bits; on CUDA: fp8
    weights, of checkpoints that are not quantized. The other names are methods of checkpoints that are
    quantized already, which are detected without this option: giving one only checks it."""
    quantized_inputs: Annotated[str, OptionDoc(MODEL, ("auto", "8", "16"))] = "auto"
    """Bits to which inputs of a quantized checkpoint's matrices are rounded on the CPU; auto: 8 for GGUF
    files, as llama.cpp does, unless the dtype is float32; for others what they say, or 16."""
    language_model_only: Annotated[bool, OptionDoc(MODEL)] = False
    """Serve a model of text and pictures as a text model, without loading its vision tower."""
    enable_prompt_embeds: Annotated[bool, OptionDoc(MODEL)] = False
    """Accept embeddings instead of a prompt's tokens (`prompt_embeds` of completions, chats and programs)."""
    max_model_len: Annotated[int | None, OptionDoc(MODEL, least=1, read=_max_model_len)] = None
    """Context length, prompt and output together, in tokens; 32k and 1M work. Not given, -1 or auto: what the
    model and the memory allow."""
    seed: Annotated[int, OptionDoc(MODEL)] = 0
    """Seed of everything random at start, such as dummy weights, and of what an `LLM` of Python draws."""

    device: Annotated[str, OptionDoc(MEMORY, ("auto", "cpu", "cuda"))] = "auto"
    """The device to run on; auto takes CUDA if it is there."""
    cpu_threads: Annotated[int | None, OptionDoc(MEMORY, least=1, most=1024)] = None
    """Threads of a forward pass on the CPU, in each worker; default: all cores allowed, shared among the
    machine's workers."""
    gpu_memory_utilization: Annotated[
        float | None, OptionDoc(MEMORY, least=0.01, most=1, short="--device-memory-utilization")
    ] = None
    """Share of the device's memory to use; default on CUDA: 0.92. On the CPU it is the share of the machine's
    or container's memory for weights and KV cache, up to what is available; default there: a cache of 40 % of
    what is available, 4G at most."""
    kv_cache_memory_bytes: Annotated[int | None, OptionDoc(MEMORY, least=1, read=size)] = None
    """Size of the KV cache, instead of a share of the memory; 4G and 800m work."""
    disable_hybrid_kv_cache_manager: Annotated[bool, OptionDoc(MEMORY)] = False
    """Keep the keys and values of layers with a window as long as those of all others."""
    enforce_eager: Annotated[bool, OptionDoc(MEMORY)] = False
    """Launch the kernels of every step one by one: no CUDA graphs. The CPU has none."""
    max_cudagraph_capture_size: Annotated[int | None, OptionDoc(MEMORY, least=0, most=2048)] = None
    """Tokens of the largest step that runs as a CUDA graph, decoding rows among them; 0: none does. Default:
    512, and on cards of 70 GiB and more up to 2048, the more the smaller a layer is. The CPU has none."""
    kv_cache_dtype: Annotated[
        str,
        OptionDoc(
            MEMORY,
            (
                *("auto", "float32", "bfloat16", "float16"),
                *("int8", "int8_per_token_head", "fp8", "fp8_e4m3", "fp8_e5m2"),
            ),
        ),
    ] = "auto"
    """Number format of the KV cache; auto is that of the model, or fp8 if its checkpoint asks for it. 8 bits
    halve it: int8 (also int8_per_token_head) on the CPU; on CUDA fp8 (also fp8_e4m3) from compute capability
    8.9 on, fp8_e5m2 from 8.0. One of 16 or 32 bits must be the model's own."""
    block_size: Annotated[int | None, OptionDoc(MEMORY, least=1)] = None
    """Tokens in a block of the KV cache; default: 64 on CUDA, 32 on the CPU."""
    kv_offloading_size: Annotated[float | None, OptionDoc(MEMORY, least=0.001)] = None
    """GiB of the host's pinned memory, for all workers of a replica together, in which blocks that are
    evicted from a card's KV cache are kept, so that prompts find them again; with --kv-cache-dir those that
    were written last. On CUDA. Default with --kv-cache-dir: 4."""
    kv_cache_dir: Annotated[str | None, OptionDoc(MEMORY)] = None
    """A folder in which blocks of the KV cache are kept, so that prompts which were read once are not read
    again after a restart, or when memory was needed for others."""
    kv_cache_disk_gib: Annotated[float | None, OptionDoc(MEMORY, least=0.001)] = None
    """Maximum GiB of files there; the least recently used are deleted first. Default: 10."""
    packed_cache: Annotated[bool, OptionDoc(MEMORY)] = True
    """Keep weights, as a CPU's kernels read them, in the cache folder ($XDG_CACHE_HOME/facet, or
    ~/.cache/facet), where the next start maps them in place of packing them again."""
    packed_cache_gib: Annotated[float, OptionDoc(MEMORY, least=0.001)] = 32.0
    """Maximum GiB of packed weights there; the least recently used are deleted first."""
    num_gpu_blocks_override: Annotated[int | None, OptionDoc(MEMORY, least=1)] = None
    """Number of blocks of the KV cache, instead of as many as fit."""
    mm_encoder_cache_gb: Annotated[float | None, OptionDoc(MEMORY, least=0)] = None
    """GiB of embeddings of pictures that each worker of the first stage keeps for later requests, beyond
    those that a step may need; 0: none. Default: an eighth of the memory for caches, 4 at most; none for
    models without a KV cache."""
    state_snapshots: Annotated[int | None, OptionDoc(MEMORY, least=0)] = None
    """Number of states of hybrid models that are kept for prefix caching; 0: their prefixes are not cached;
    default: what a quarter of the memory for caches holds."""

    max_num_seqs: Annotated[int | None, OptionDoc(SCHEDULER, least=1)] = None
    """Maximum number of sequences in a step; default: by device."""
    max_num_batched_tokens: Annotated[int | None, OptionDoc(SCHEDULER, least=1)] = None
    """Maximum number of tokens in a step; default: by device."""

    lora: LoraOptions = LoraOptions()

    logits_processors: Annotated[list[str], OptionDoc(PLUGINS, repeats=True)] = []
    """Classes that change logits before tokens are chosen, as module:Class; requests give them arguments."""
    worker_extension_cls: Annotated[str | None, OptionDoc(PLUGINS)] = None
    """A class, as module.Class, whose methods /collective_rpc calls in every worker."""
    profiler_config: Annotated[dict[str, object], OptionDoc(PLUGINS)] = {}
    """What /start_profile and /stop_profile record in every worker: {"profiler": "torch",
    "torch_profiler_dir": FOLDER} and others (docs/plugins.md)."""


class ProfilerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of --profiler-config, named as in vLLM."""

    profiler: Literal["torch"]
    torch_profiler_dir: str
    torch_profiler_with_stack: bool = True
    torch_profiler_with_flops: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_record_shapes: bool = False
    torch_profiler_use_gzip: bool = True
    ignore_frontend: bool = True
    """Whether only workers are recorded, which is so anyway."""


def read_profiler(config: dict[str, object]) -> ProfilerOptions | None:
    """The options of the profiler; None if there is none. Raises ValueError, which names the flag."""
    if not config:
        return None
    try:
        return msgspec.convert(config, ProfilerOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(ProfilerOptions.__struct_fields__)
        raise ValueError(
            f"--profiler-config: {error}; its fields are {known}, and the profiler is torch"
        ) from None
