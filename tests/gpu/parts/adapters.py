"""Adapters: the card's greedy tokens beside the CPU's, and what steps with adapters cost beside others."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adapted_runner import generate, load
from adapter_files import write_adapter
from beside_cpu import compared
from beside_cpu import opened as opened_beside
from dummy import GREEDY, Dummy, opened
from results import Result
from shapes import Shape
from workbench import Part, Workbench

from models.config import read_config
from worker.options import LoraOptions
from worker.protocol import NewSeq, SeqStep

_COUNT, _RANK = 8, 16
_CHOSEN = [{0: (1, 0), 1: (2, 0), 2: (0, 0)}, {0: (3, 0), 1: (2, 3)}, {0: (1, 0), 1: (3, 0)}, {2: (0, 0)}]
"""The adapters of slots, round by round: three take turns in two places."""


def _modules(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The tensors of an adapter of all layers."""
    heads, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = {"q": (shape.hidden, heads), "k": (shape.hidden, keys), "v": (shape.hidden, keys)}
    attention["o"] = (heads, shape.hidden)
    inner = dict.fromkeys(("gate", "up"), (shape.hidden, shape.inner)) | {"down": (shape.inner, shape.hidden)}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(shape.layers):
        for room, sizes in (("self_attn", attention), ("mlp", inner)):
            for name, (inputs, outputs) in sizes.items():
                module = f"model.layers.{layer}.{room}.{name}_proj"
                shapes[f"{module}.lora_A.weight"] = (_RANK, inputs)
                shapes[f"{module}.lora_B.weight"] = (outputs, _RANK)
    return shapes


def _write(folder: Path, shape: Shape, count: int) -> list[Path]:
    fields = {"r": _RANK, "lora_alpha": 32}
    return [
        write_adapter(folder / f"adapter-{seed}", _modules(shape), fields, seed)
        for seed in range(1, count + 1)
    ]


def compare_tokens(bench: Workbench) -> Iterator[Result]:
    """Three adapters in two places, replayed and as it comes."""
    from tiny import tiny_checkpoint

    folder = tiny_checkpoint("LlamaForCausalLM", Path(bench.folder) / "adapted", num_hidden_layers=2)
    model = read_config(folder)
    raw: Any = model.raw
    shape = Shape(
        "tiny", "llama", model.hidden_size, raw["intermediate_size"], 2, raw["num_attention_heads"],
        raw["num_key_value_heads"], model.vocab_size, model.head_dim,
    )  # fmt: skip
    adapters = _write(folder.parent, shape, 3)
    lora, found = LoraOptions(enable_lora=True, max_loras=2, max_cpu_loras=3), list[Any]()
    for device in ("cpu", bench.target.type):
        sizes: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 2 * 64}  # of a card's blocks
        with opened_beside(folder, device, dtype="float32", lora=lora, **sizes) as runner:
            for number, adapter in enumerate(adapters, 1):
                load(runner, number, adapter)
            rounds = [generate(runner, chosen, reported) for chosen in _CHOSEN for reported in (None, 3)]
        found.append([{slot: [token for token, _ in each] for slot, each in all_.items()} for all_ in rounds])
    yield compared("tokens with adapters", found[1], found[0])


def measure_steps(bench: Workbench) -> Iterator[Result]:
    """Steps of single tokens with different adapters, and a prompt with one, beside the same without."""
    shape, rows = bench.shape("0.6B"), bench.size(32, 2)
    lora = LoraOptions(enable_lora=True)
    length = bench.tokens(256)
    with opened(bench, shape, rows=rows, longest=bench.tokens(1200) + 300, lora=lora) as dummy:
        dummy.make_graphs(whole_only=False)
        for number, folder in enumerate(_write(Path(bench.folder) / "steps", shape, _COUNT), 1):
            load(dummy.runner, number, folder)
        for count in bench.some((1, 8, 32)):
            plain, adapted = (
                dummy.decode(min(count, rows), length, bench.size(64, 2), GREEDY, adapters)[0]
                for adapters in (0, _COUNT)
            )
            yield _beside(f"a step of {count} rows", plain, adapted)
        for tokens in bench.some((128, 1024)):
            plain, adapted = (_prompt(dummy, bench.tokens(tokens), number) for number in (0, 1))
            yield _beside(f"a prompt of {tokens} tokens", plain, adapted)


def _prompt(dummy: Dummy, tokens: int, adapter: int) -> float:
    """The median of some prompts' seconds."""
    took: list[float] = []
    for _ in range(dummy.bench.size(9, 1)):
        began = time.perf_counter()
        new = NewSeq(0, [5] * tokens, tokens, GREEDY, adapter=adapter)
        dummy.run([SeqStep(0, 0, tokens, dummy.blocks(tokens + 1), True)], [new])
        took.append(time.perf_counter() - began)
    return sorted(took)[len(took) // 2]


def _beside(name: str, plain: float, adapted: float) -> Result:
    return Result(f"{name} with adapters", f"{adapted / plain:.2f} times one without", 1e3 * adapted, "ms")


PARTS = (Part("tokens", compare_tokens, 60), Part("0.6B", measure_steps, 80))
