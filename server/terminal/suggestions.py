"""Names models that fit a machine, for `facet models --suggest`, the log of `serve` and the documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from server.terminal.console import columns, gigabytes
from server.terminal.doctor import printed_by
from worker.host import machine, nvidia
from worker.kernels.cpu.library import levels_here

_GB = 10**9


class Model(NamedTuple):
    name: str
    """Its hub id, with the form of a GGUF file behind it."""
    weights: int
    """Bytes of its weights."""
    read: int
    """Bytes of them that a token of one conversation reads: of a mixture, those of few experts."""


CHAT = (
    Model("Qwen/Qwen3-32B", 65_524_246_528, 65_524_246_528),
    Model("Qwen/Qwen3-14B", 29_536_614_400, 29_536_614_400),
    Model("Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", 18_556_685_824, 2_000_000_000),
    Model("openai/gpt-oss-20b", 13_761_264_768, 3_700_000_000),
    Model("ggml-org/gemma-3-12b-it-GGUF:Q4_K_M", 7_300_574_976, 7_300_574_976),
    Model("Qwen/Qwen3-8B-GGUF:Q4_K_M", 5_027_783_488, 5_027_783_488),
    Model("Qwen/Qwen3-4B-GGUF:Q4_K_M", 2_497_280_256, 2_497_280_256),
    Model("Qwen/Qwen3-1.7B-GGUF:Q8_0", 1_834_426_016, 1_834_426_016),
    Model("Qwen/Qwen3-0.6B-GGUF:Q8_0", 639_446_688, 639_446_688),
    Model("HuggingFaceTB/SmolLM2-135M-Instruct", 269_060_552, 269_060_552),
)
"""Models for conversations, the best first."""
VECTORS = (
    Model("Qwen/Qwen3-Embedding-4B", 8_043_592_088, 8_043_592_088),
    Model("Qwen/Qwen3-Embedding-0.6B", 1_191_586_416, 1_191_586_416),
    Model("intfloat/multilingual-e5-small", 470_641_600, 470_641_600),
    Model("sentence-transformers/all-MiniLM-L6-v2", 90_868_376, 90_868_376),
)
"""Models for vectors of texts, the best first."""

_BESIDE = 3 * _GB // 2
"""Bytes that the processes, a step and a cache for some conversations take beside the weights."""


class Machine(NamedTuple):
    """What decides which models a machine can serve."""

    memory: int
    """Bytes for models: of the card, if there is one that can be used."""
    processor: str | None
    """The best kernels for its processor; "" if there are none, None if a card computes."""

    @property
    def most_read(self) -> int:
        """Bytes that it reads, and computes with, in the time that a reader waits for a token."""
        if self.processor is None:
            return self.memory
        return (6 if self.processor.startswith(("amx", "avx512")) else 4 if self.processor else 1) * _GB

    def __str__(self) -> str:
        if self.processor is None:
            return f"a card with {gigabytes(self.memory)} free"
        return f"{gigabytes(self.memory)} of memory available, kernels: {self.processor or 'none'}"


def this_machine(root: Path = Path("/")) -> Machine:
    """This machine, with the memory that is available now."""
    if nvidia.cards_here(root) and nvidia.why_unusable(nvidia.cuda_of_torch(), root) is None:
        query = ("--query-gpu=memory.free", "--format=csv,noheader,nounits")
        cards = [int(words) << 20 for words in printed_by("nvidia-smi", *query).split() if words.isdigit()]
        if cards:
            return Machine(max(cards), None)
    levels = levels_here(root / "proc/cpuinfo")
    return Machine(machine.available_memory(root), levels[0].name if levels else "")


def suggested(here: Machine) -> dict[str, Model]:
    """Three models by what they are for: the best answers, quicker ones, vectors."""
    best = _first(CHAT, here.memory - _BESIDE, here.most_read)
    quick = _first(CHAT, best.weights // 2, best.read * 3 // 5)
    return {
        "best answers": best,
        "quicker": quick,
        "vectors": _first(VECTORS, (here.memory - _BESIDE) // 4, here.most_read // 5),
    }


def _first(models: Sequence[Model], most_weights: int, most_read: int) -> Model:
    """The best of these models within the limits, or the smallest."""
    fitting = (one for one in models if one.weights <= most_weights and one.read <= most_read)
    return next(fitting, models[-1])


def hint() -> str:
    """A line for who serves the demo model because no other was named."""
    best, quick, vectors = (one.name for one in suggested(this_machine()).values())
    return (
        f"the small demo model is served; for this machine: `facet serve {best}`, quicker {quick}, for "
        f"vectors {vectors}; `facet models --suggest` says more"
    )


def show() -> Iterable[str]:
    """The lines of `facet models --suggest`."""
    here = this_machine()
    rows = [
        (f"{use}:", f"facet serve {model.name}", gigabytes(model.weights))
        for use, model in suggested(here).items()
    ]
    return [f"for this machine ({here}):", *columns(rows)]


def table() -> str:
    """The table from machine to model in the documents. Of a machine's memory, other programs take a part."""
    machines = [
        *((f"{size} GB, {name}", Machine(size * _GB * 7 // 8, name.split()[0].lower()))
          for name in ("AVX2 or NEON", "AVX512 or AMX") for size in (4, 8, 16, 32)),
        *((f"a card of {size} GB", Machine(size * _GB, None)) for size in (8, 12, 24, 48, 80)),
    ]  # fmt: skip
    rows = ["| machine | best answers | quicker | vectors |", "|---|---|---|---|"]
    for name, here in machines:
        cells = (f"`{one.name}` ({one.weights / 1e9:.1f} GB)" for one in suggested(here).values())
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)
