"""What a tiny checkpoint of each family of text models answers, which tests compare with what is stored.

To store what all families answer now, or some: python tests/support/family_answers.py [NAME...]
"""

from __future__ import annotations

import gc
import math
import random
import sys
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tiny import ARCHITECTURES, ENCODERS, tiny_checkpoint

from engine_core.config import EngineConfig
from engine_core.resolve_checkpoint import make_worker_config
from models.config import read_config
from server.terminal.proving.checks import Facts, Prompt
from worker.options import WorkerOptions
from worker.proof import compute
from worker.proof.messages import Computed, Proof, ProofOrder

FAMILIES = (*ARCHITECTURES, *(f"{name}Model" for name in ENCODERS))
FILE = Path(__file__).parents[1] / "server" / "terminal" / "proving" / "families.json"
LENGTH, SHOWN, TOLERANCE = 8, 3, 2e-3
_drawn = random.Random(1)
PROMPTS = [_drawn.choices(range(5, 300), k=count) for count in (23, 9)]


def proof_of(family: str) -> Proof:
    """Compute the prompts with a checkpoint that is made for that."""
    with tempfile.TemporaryDirectory() as name:
        folder = tiny_checkpoint(family, Path(name))
        gc.freeze()  # what transformers has imported for that, or closing workers looks through all of it
        options = WorkerOptions(dtype="float32", cpu_threads=1, max_model_len=64, max_num_seqs=1)
        engine = EngineConfig(model=name, worker=options)
        config = make_worker_config(engine, read_config(folder), folder)
        return compute.prove(ProofOrder(config, PROMPTS, LENGTH, operations=False))


def facts_of(proof: Proof) -> Facts:
    """What is stored of a proof. All numbers are rounded, as other processors compute others behind these."""
    prompts = [
        Prompt("", [], [_shown(layer) for layer in found.layers], *_answer(found)) for found in proof.computed
    ]
    return Facts(proof.weights[:16], TOLERANCE, prompts)


def _answer(found: Computed) -> tuple[list[int], list[float], list[float]]:
    return found.tokens, _rounded(found.logprobs), _rounded(found.vector[: 2 * SHOWN])


def _shown(layer: bytes) -> list[float]:
    numbers = array("f", layer)
    size = math.sqrt(math.fsum(each * each for each in numbers) / len(numbers))
    return _rounded([size, *numbers[:SHOWN]])


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [float(f"{each:.5g}") for each in numbers]


def stored() -> dict[str, Facts]:
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, Facts])


def main(names: Sequence[str]) -> None:
    kept = stored() if names else {}
    for name in names or FAMILIES:
        kept[name] = facts_of(proof_of(name))
        lines = [f'"{each}": {msgspec.json.encode(kept[each]).decode()}' for each in sorted(kept)]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
