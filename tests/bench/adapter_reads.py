"""Measures what it takes to read adapters beside a model: time of a processor, memory, and longer steps.

    PYTHONPATH=.:tests/support python tests/bench/adapter_reads.py [--rank 16] [--count 16] [--layers 28]

The base has the shape of Qwen3-0.6B with a small vocabulary, and random weights. A sequence decodes while
another thread reads adapters, as a server does it.
"""

import argparse
import json
import statistics
import time
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import torch
from opened import open_runner
from safetensors.torch import save_file

from models.lora_config import CONFIG_FILE, PREFIX, TENSORS_FILE
from worker.calls.messages import ENTER_ADAPTER, READ_ADAPTER, WorkerCall
from worker.options import LoraOptions
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput
from worker.runner import Runner

_SIZES = {"dtype": "bfloat16", "max_num_seqs": 4, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 27}
_HIDDEN, _INNER, _HEADS, _KEYS = 1024, 3072, 2048, 1024
_SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_attention_heads": _HEADS // 128,
    "num_key_value_heads": _KEYS // 128,
    "head_dim": 128,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
_MODULES = {
    "self_attn.q_proj": (_HEADS, _HIDDEN),
    "self_attn.k_proj": (_KEYS, _HIDDEN),
    "self_attn.v_proj": (_KEYS, _HIDDEN),
    "self_attn.o_proj": (_HIDDEN, _HEADS),
    "mlp.gate_proj": (_INNER, _HIDDEN),
    "mlp.up_proj": (_INNER, _HIDDEN),
    "mlp.down_proj": (_HIDDEN, _INNER),
}


def write(folder: Path, rank: int, layers: int) -> int:
    """Write an adapter -> the bytes of its tensors."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name, (outputs, inputs) in _MODULES.items():
        for layer in range(layers):
            module = f"{PREFIX}model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs).bfloat16()
            tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank).bfloat16()
    save_file(tensors, folder / TENSORS_FILE)
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    (folder / CONFIG_FILE).write_text(json.dumps(fields))
    return (folder / TENSORS_FILE).stat().st_size


def call(runner: Runner, method: str, *given: object) -> None:
    returned = runner.call(WorkerCall(1, method, list(given)))
    if returned.error:
        raise RuntimeError(returned.error)


def resident() -> int:
    """The bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def gaps(runner: Runner, reading: Thread | None, steps: int) -> list[float]:
    """The seconds of single tokens, as many as given or while the thread runs."""
    took: list[float] = []
    params, numbers = Sampling(max_tokens=1000, temperature=0), count(1)
    blocks = list(range(1024 // runner.facts.block_size))
    runner.launch(
        StepInput(next(numbers), [NewSeq(0, [5] * 64, 64, params)], [SeqStep(0, 0, 64, blocks, samples=True)])
    ).result()
    if reading is not None:
        reading.start()
    for at in range(900):
        if at >= steps if reading is None else not reading.is_alive():
            break
        started = time.perf_counter()
        row = SeqStep(0, 64 + at, 1, [], samples=True, output_index=at + 1)
        runner.launch(StepInput(next(numbers), [], [row])).result()
        took.append(time.perf_counter() - started)
    return took


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("rank", 16), ("count", 16), ("layers", 28)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with TemporaryDirectory() as place:
        base, adapter = Path(place) / "base", Path(place) / "adapter"
        base.mkdir()
        (base / "config.json").write_text(json.dumps({**_SHAPE, "num_hidden_layers": given.layers}))
        size = write(adapter, given.rank, given.layers)
        lora = LoraOptions(enable_lora=True, max_cpu_loras=given.count + 1, max_lora_rank=given.rank)
        runner = open_runner(base, load_format="dummy", **_SIZES, lora=lora)
        call(runner, READ_ADAPTER, 1, str(adapter))
        call(runner, ENTER_ADAPTER, 1)
        before, own, walls = resident(), list[float](), list[float]()

        def read(number: int) -> None:
            began, started = time.thread_time(), time.perf_counter()
            call(runner, READ_ADAPTER, number, str(adapter))
            own.append(time.thread_time() - began)
            walls.append(time.perf_counter() - started)

        for number in range(2, given.count + 2):
            read(number)
            call(runner, ENTER_ADAPTER, number)
        print(f"{size / 1e6:.1f} MB: {1e3 * statistics.median(own):.0f} ms of a processor, ", end="")
        print(f"{statistics.median(own) / size * 1e10:.0f} ms for 10 MB, {sum(walls):.2f} s for all")
        print(f"memory: {(resident() - before) / size / given.count:.2f} times the files")
        usual = gaps(runner, None, 100)
        meanwhile = gaps(runner, Thread(target=lambda: [read(1) for _ in range(5)]), 0)
        middle = statistics.median(usual)
        longest = max(meanwhile) / middle
        print(f"steps: {1e3 * middle:.1f} ms; the longest while adapters are read: {longest:.1f} of them")
        runner.close()


if __name__ == "__main__":
    main()
