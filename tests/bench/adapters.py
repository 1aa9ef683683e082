"""Measures an engine whose requests name many adapters, beside one whose requests name a single one.

    PYTHONPATH=.:tests/support python tests/bench/adapters.py [--requests 160] [--at-once 32]

The shape of Llama 135M with random weights, adapters of rank 16 on all seven projections, and an engine with
room for 32 of them, which has those that are asked for most. Requests name one adapter, 32 and 33 in turn,
and 100 as Zipf's law has it. Printed: the requests a second, in proportion to those of one adapter, the
loads, and the slowest request.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from adapter_files import write_adapter
from checkpoints import SHAPES
from fake_adapters import adapter
from safetensors.torch import load_file, save_file
from sizes import engine_config

from engine_core.adapters.messages import Adapter
from engine_core.engine import Engine
from engine_core.protocol import AddRequest, Failed, Tokens
from models.lora_config import CONFIG_FILE, TENSORS_FILE
from worker.protocol import Sampling

RANK, MOST = 16, 100


@dataclass
class Round:
    rate: float
    """Requests a second."""
    loads: int
    slowest: float
    """The most seconds of a request."""


def write_files(folder: Path) -> list[Adapter]:
    """The config of the model, and adapters that differ in their scales and share a file of tensors."""
    shape = SHAPES["llama-135m"]
    (folder / "config.json").write_text(
        json.dumps({**shape.to_dict(), "architectures": ["LlamaForCausalLM"]})
    )
    hidden, inner = shape.hidden_size, shape.intermediate_size
    kv = hidden // shape.num_attention_heads * shape.num_key_value_heads
    sizes = {
        f"self_attn.{name}_proj": (hidden, out)
        for name, out in zip("qkvo", (hidden, kv, kv, hidden), strict=True)
    }
    sizes |= {
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    shapes = dict[str, tuple[int, int]]()
    for layer in range(shape.num_hidden_layers):
        for name, (inputs, outputs) in sizes.items():
            shapes[f"model.layers.{layer}.{name}.lora_A.weight"] = (RANK, inputs)
            shapes[f"model.layers.{layer}.{name}.lora_B.weight"] = (outputs, RANK)
    first = write_adapter(folder / "0", shapes, {"r": RANK, "lora_alpha": RANK}) / TENSORS_FILE
    save_file({name: each.to(torch.bfloat16) for name, each in load_file(first).items()}, first)
    for number in range(1, MOST):
        fields = json.loads((folder / "0" / CONFIG_FILE).read_text()) | {"lora_alpha": RANK + number / MOST}
        (folder / str(number)).mkdir()
        (folder / str(number) / CONFIG_FILE).write_text(json.dumps(fields))
        os.link(first, folder / str(number) / TENSORS_FILE)
    return [adapter(folder / str(number)) for number in range(MOST)]


def by_zipf(adapters: list[Adapter], seed: int) -> Iterator[Adapter]:
    draw = random.Random(seed)
    weights = [1 / rank for rank in range(1, len(adapters) + 1)]
    while True:
        yield draw.choices(adapters, weights)[0]


def load_all(engine: Engine, adapters: list[Adapter]) -> None:
    """Load adapters one after another, each in the place of the one that was used longest ago."""
    assert engine.intake.adapters is not None
    for each in adapters:
        engine.intake.adapters.load(each)
    while engine.busy:
        engine.step()
        engine.intake.adapters.take_states()


def replay(engine: Engine, names: Iterator[Adapter], given: argparse.Namespace) -> Round:
    """Run so many requests, so many at a time; each has a prompt of its own."""
    assert engine.intake.adapters is not None
    draw, begun, live = random.Random(1), 0, dict[int, float]()
    slowest, before = 0.0, sum(engine.intake.adapters.stats.loads.counts)
    since = time.perf_counter()
    while begun < given.requests or live:
        while begun < given.requests and len(live) < given.at_once:
            prompt = [draw.randrange(5, 40000) for _ in range(given.read)]
            params = Sampling(max_tokens=given.written, temperature=0)
            engine.add(0, AddRequest(begun, prompt, params, adapter=next(names).digest))
            live[begun] = time.perf_counter()
            begun += 1
        for output in engine.step().get(0, []):
            assert not isinstance(output, Failed), output
            if isinstance(output, Tokens) and output.finish:
                slowest = max(slowest, time.perf_counter() - live.pop(output.id))
    seconds = time.perf_counter() - since
    return Round(given.requests / seconds, sum(engine.intake.adapters.stats.loads.counts) - before, slowest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--read", type=int, default=128)
    parser.add_argument("--written", type=int, default=32)
    parser.add_argument("--max-loras", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        adapters = write_files(Path(folder))
        shape = {"device": "cpu", "dtype": "bfloat16", "load_format": "dummy", "max_model_len": 2048}
        room = {
            "enable_lora": True,
            "max_loras": given.max_loras,
            "max_cpu_loras": 32,
            "max_num_seqs": given.at_once,
        }
        engine = Engine.start(engine_config(folder, **shape, **room), lambda _: None)
        load_all(engine, adapters[::-1])
        sides = {
            "one": lambda: cycle(adapters[:1]),
            "32 in turn": lambda: cycle(adapters[:32]),
            "33 in turn": lambda: cycle(adapters[:33]),
            "100 by Zipf": lambda: by_zipf(adapters, 1),
        }
        for _ in range(given.rounds):
            one = 0.0
            for name, names in sides.items():
                found = replay(engine, names(), given)
                one = one or found.rate
                rates = f"{found.rate:6.2f} requests/s  {found.rate / one:.2f}"
                print(f"{name:12}{rates}  {found.loads:3} loads  slowest {found.slowest:.2f} s", flush=True)
        engine.stop()


if __name__ == "__main__":
    main()
