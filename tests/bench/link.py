"""What crosses the links between ranks, and how much faster they are together than one: a table.

    python tests/bench/link.py 8b 70b 30b-a3b /path/to/a/model --device h200 --link nvlink pcie

Only what cannot be avoided is counted: weights and cache are read once for each step, products are computed
at the device's speed, and a rank waits for every tensor that it needs from others. So real ratios are lower,
and those of a link that is bad here are bad indeed. Tokens choose their experts evenly, which real ones do
not. docs/scaling.md says what follows from it.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CONTEXT = 1024
"""Tokens behind each one that is decoded."""
CHUNK = 2048
"""Tokens of prompts in a step."""
ITEM = 2
"""Bytes of a number: bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """The width of the MLP, or of an expert."""
    vocabulary: int
    tied: bool = False
    experts: int = 1
    """The experts of each layer, of which a token takes `chosen`; 1 means that it has an MLP."""
    chosen: int = 1

    @property
    def expert_parameters(self) -> int:
        """The parameters of one expert of all layers, or of all MLPs."""
        return self.layers * 3 * self.hidden * self.inner

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        vocabulary = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (attention + router) + self.experts * self.expert_parameters + vocabulary

    @property
    def weight_bytes(self) -> int:
        return self.parameters * ITEM

    @property
    def read_bytes(self) -> int:
        """Bytes of weights, but for experts, that are read in a step: of the embeddings only rows."""
        looked_up = 0 if self.tied else self.vocabulary * self.hidden
        return (self.parameters - self.experts * self.expert_parameters - looked_up) * ITEM

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * ITEM


SHAPES = {
    "0.6b": Shape(
        hidden=1024,
        layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        inner=3072,
        vocabulary=151936,
        tied=True,
    ),
    "8b": Shape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, inner=14336, vocabulary=128256),
    "70b": Shape(hidden=8192, layers=80, heads=64, kv_heads=8, head_dim=128, inner=28672, vocabulary=128256),
    "30b-a3b": Shape(
        hidden=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        inner=768,
        vocabulary=151936,
        experts=128,
        chosen=8,
    ),
}


@dataclass(frozen=True)
class Device:
    memory: float
    """Bytes per second read from memory."""
    arithmetic: float
    """Operations per second in bfloat16 products."""


DEVICES = {"h200": Device(3.8e12, 600e12), "cpu": Device(45e9, 1.0e12)}
"""What kernels reach, not what the makers promise. cpu: two cores with AVX-512."""


@dataclass(frozen=True)
class Link:
    bandwidth: float
    """Bytes per second that a rank can send."""
    latency: float
    """Seconds until a small message has passed all ranks."""
    exchanges: bool = False
    """Every rank sends to every other, as on a CPU; else sums go round in a ring, as NCCL does it."""


LINKS = {
    "nvlink": Link(360e9, 12e-6),
    "pcie": Link(50e9, 25e-6),
    "ethernet": Link(11e9, 50e-6),  # 100 Gb/s
    "loopback": Link(1.8e9, 45e-6, exchanges=True),  # gloo between two processes, measured
}


@dataclass(frozen=True)
class Way:
    """A way to spread a model: ranks that share each layer, stages into which the layers are cut, or replicas
    that share experts alone."""

    tensor: int = 1
    stages: int = 1
    whole: bool = False
    """Whether ranks have some experts whole, instead of a piece of each."""
    replicas: int = 1
    """Replicas of one rank each, which share whole experts."""
    apart: bool = False
    """Whether tokens go to the ranks of their experts alone, each of which returns its result by itself."""

    def __str__(self) -> str:
        if self.replicas > 1:
            return f"DP {self.replicas}, whole experts{', all_to_all' if self.apart else ''}"
        if self.stages > 1:
            return f"PP {self.stages}"
        return f"TP {self.tensor}, whole experts" if self.whole else f"TP {self.tensor}"

    @property
    def ranks(self) -> int:
        return self.tensor * self.stages * self.replicas


WAYS = [Way(tensor=2), Way(tensor=4), Way(tensor=8), Way(stages=2), Way(stages=4)]
WHOLE = [
    *(Way(tensor=ranks, whole=True) for ranks in (2, 4, 8)),
    *(Way(replicas=n, whole=True, apart=apart) for apart in (False, True) for n in (2, 4, 8)),
]


@dataclass(frozen=True)
class Routed:
    """What the slowest rank has to do for the experts of a layer, on average."""

    touched: float
    """Experts whose weights it reads; a piece of an expert counts as that part of one."""
    choices: float
    """Products of a token with an expert, in the same way."""


@cache
def route(experts: int, chosen: int, rows: int, ranks: int, whole: bool) -> Routed:
    """The choices of so many tokens, each even and independent of others: the mean of random draws."""
    if experts == 1 or not whole:
        touched = experts * (1 - (1 - chosen / experts) ** rows)
        return Routed(touched / ranks, rows * chosen / ranks)
    made, draws = random.Random(rows), max(20, 400 // rows)
    held, touched, choices = experts // ranks, 0, 0
    for _ in range(draws):
        all_chosen = [each for _ in range(rows) for each in made.sample(range(experts), chosen)]
        touched += max(sum(expert // held == rank for expert in set(all_chosen)) for rank in range(ranks))
        choices += max(sum(expert // held == rank for expert in all_chosen) for rank in range(ranks))
    return Routed(touched / draws, choices / draws)


def sum_bytes(link: Link, ranks: int, nbytes: float) -> float:
    """What one rank sends so that all have the sum of tensors of that size."""
    return nbytes * (ranks - 1 if link.exchanges else 2 * (ranks - 1) / ranks)


def gather_bytes(link: Link, ranks: int, nbytes: float) -> float:
    """What one rank sends so that all have a tensor of that size, of which each has a piece."""
    return nbytes * (ranks - 1) / ranks


def sums(shape: Shape) -> int:
    """Sums of residual streams in a step: after attention and MLP of each layer, and of the embeddings."""
    return 2 * shape.layers + 1


def sent_bytes(shape: Shape, way: Way, link: Link, *, samples: bool) -> float:
    """Bytes that one rank sends for each token that is computed, of replicas for each of its own."""
    stream = shape.hidden * ITEM
    if way.replicas > 1:
        return shape.layers * expert_bytes(shape, way)
    if way.stages > 1:
        return stream
    logits = gather_bytes(link, way.tensor, 4 * shape.vocabulary) if samples else 0.0
    return sums(shape) * sum_bytes(link, way.tensor, stream) + logits


def expert_bytes(shape: Shape, way: Way) -> float:
    """What a replica sends in a layer of experts for a token of its own, and for others' that reach it.

    All of them have equally many tokens, so that the results that it returns are as many as it gets.
    """
    others, choice = way.replicas - 1, 4
    if not way.apart:  # the row with numbers and weights of experts, and a sum of results
        return others * (2 * shape.hidden * ITEM + 2 * choice * shape.chosen)
    reached = others * (1 - (1 - 1 / way.replicas) ** shape.chosen)
    elsewhere = shape.chosen * others / way.replicas
    return reached * (shape.hidden * ITEM + choice * shape.chosen) + elsewhere * shape.hidden * 4


def compute_seconds(shape: Shape, device: Device, rows: float, context: int, way: Way) -> float:
    """Seconds of a rank's part of a step of so many rows, those of all replicas together, by itself."""
    kv_share = way.stages * min(way.tensor, shape.kv_heads) * way.replicas
    routed = route(shape.experts, shape.chosen, int(rows), way.ranks, way.whole)
    nbytes = shape.read_bytes * way.replicas / way.ranks + rows * context * shape.kv_bytes / kv_share
    nbytes += routed.touched * shape.expert_parameters * ITEM
    operations = 2 * shape.read_bytes / ITEM * rows / way.ranks
    operations += 2 * shape.expert_parameters * routed.choices
    return max(nbytes / device.memory, operations / device.arithmetic)


def link_seconds(shape: Shape, link: Link, rows: float, way: Way, *, samples: bool) -> float:
    """Seconds that a rank waits in a step for what others send."""
    times = 1 if way.stages > 1 else sums(shape) + samples
    if way.replicas > 1:
        times, rows = shape.layers * (3 if way.apart else 2), rows / way.replicas
    return times * link.latency + rows * sent_bytes(shape, way, link, samples=samples) / link.bandwidth


def decode_ratio(shape: Shape, device: Device, link: Link, way: Way, batch: int) -> float:
    """Tokens per second beside one rank alone, for that many sequences."""
    alone = compute_seconds(shape, device, batch, CONTEXT, Way())
    rows = -(-batch // way.stages)  # the stages work at the same time, each on some of the sequences
    own = compute_seconds(shape, device, rows, CONTEXT, way)
    return alone / (way.stages * (own + link_seconds(shape, link, rows, way, samples=True)))


def prefill_ratio(shape: Shape, device: Device, link: Link, way: Way) -> float:
    """Prompt tokens per second beside one rank alone, while more prompts always wait."""
    alone = compute_seconds(shape, device, CHUNK, 0, Way())
    own = compute_seconds(shape, device, CHUNK, 0, way)
    return alone / (own + link_seconds(shape, link, CHUNK, way, samples=False))


def read_shape(folder: Path) -> Shape:
    fields = json.loads((folder / "config.json").read_text())
    heads = fields["num_attention_heads"]
    return Shape(
        hidden=fields["hidden_size"],
        layers=fields["num_hidden_layers"],
        heads=heads,
        kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
        inner=fields["intermediate_size"],
        vocabulary=fields["vocab_size"],
        tied=fields.get("tie_word_embeddings", False),
    )


def rows(shape: Shape, device: Device, links: Sequence[str]) -> Iterator[str]:
    yield "| link | ranks | weights, GiB | sent per token, bytes | batch 1 | batch 32 | batch 256 | prompts |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for name in links:
        link = LINKS[name]
        for way in WAYS + (WHOLE if shape.experts > 1 else []):
            ratios = [decode_ratio(shape, device, link, way, batch) for batch in (1, 32, 256)]
            ratios.append(prefill_ratio(shape, device, link, way))
            cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            held = shape.weight_bytes / way.ranks
            if way.replicas > 1:  # all but experts is there in each
                experts = shape.experts * shape.expert_parameters * ITEM
                held = shape.weight_bytes - experts + experts / way.ranks
            weights = held / 2**30
            sent = sent_bytes(shape, way, link, samples=True)
            yield f"| {name} | {way} | {weights:.1f} | {sent:,.0f} | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+", help=f"{', '.join(SHAPES)}, or folders with a config.json")
    parser.add_argument("--device", choices=DEVICES, default="h200")
    parser.add_argument("--link", nargs="+", choices=LINKS, default=["nvlink", "pcie", "ethernet"])
    asked = parser.parse_args()
    for model in asked.models:
        shape = SHAPES.get(model) or read_shape(Path(model))
        print(f"\n{model}: {shape.parameters / 1e9:.2f} billion parameters, on {asked.device}\n")
        print("\n".join(rows(shape, DEVICES[asked.device], asked.link)))


if __name__ == "__main__":
    main()
