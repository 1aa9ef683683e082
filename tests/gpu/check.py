"""Says what this card does, in one command and under ten minutes: `make gpu-check`.

    python tests/gpu/check.py [--only SECTION ...] [--out FOLDER]

It installs nothing and needs no network. Each section has a limit of time and cannot stop the next. Lines
are printed as they come; `gpu-check.json` is written anew after each section, so a run that is killed leaves
what it had. The exit code is the number of wrong results, at most 100, or 2 where there is no card. A slow
result is no wrong one: figures stand beside the floor that the card's own speed sets.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(Path(__file__).parent)]

from latent import measure_draws, measure_latent  # noqa: E402
from measures import Ceilings, Result, measure_ceilings, measure_engine, measure_kernels  # noqa: E402
from products import measure_experts, measure_products, measure_rounding, measure_small_cache  # noqa: E402
from steps import measure_steps  # noqa: E402

NO_CARD, MOST_WRONG = 2, 100


def card(target: torch.device, ceilings: Ceilings) -> Iterator[Result]:
    """The name of the card, and what it can do at most: the floors of all else."""
    found = torch.cuda.get_device_properties(target)
    yield Result("card", f"{found.name}, {found.major}.{found.minor}, {found.total_memory >> 30} GiB")
    yield Result("torch", f"{torch.__version__} for CUDA {torch.version.cuda}")
    yield Result("copy", "", ceilings.bytes_per_second / 1e12, "TB/s")
    yield Result("products in bfloat16", "", ceilings.operations_per_second / 1e12, "TFLOP/s")


def right(target: torch.device, ceilings: Ceilings) -> Iterator[Result]:
    """Every kernel against the reference, by the tests that the interpreter runs elsewhere."""
    from worker.kernels import check
    from worker.kernels.cuda import table
    from worker.kernels.cuda.card import Card

    for dim in (64, 96, 128, 256):
        names = check.wrong(table.bind(Card.of(target)), target=target, dim=dim)
        yield Result(f"operations, heads of {dim}", ", ".join(names) or "right", wrong=len(names))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "tests/worker/kernels/cuda"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    last = (run.stdout.strip().splitlines() or ["pytest did not start"])[-1]
    yield Result("tests of kernels", last, wrong=int(run.returncode != 0))


def products(target: torch.device, ceilings: Ceilings) -> Iterator[Result]:
    """Quantized matrices, with inputs of 16 and of 8 bits, experts, and a cache of 8 bits."""
    from worker.kernels.cuda import table
    from worker.kernels.cuda.card import Card
    from worker.kernels.cuda.products.rounded import multiply_in_8_bits

    card = Card.of(target)
    operations = table.bind(card)
    if card.rounds_inputs:
        keeps = table.bind(replace(card, capability=80))  # a card that rounds no inputs
        ways = {"16 bits": keeps["linear"]} | {
            name: partial(multiply_in_8_bits, bias=None, card=replace(card, scaled_mm=by_torch), wide=False)
            for name, by_torch in (("8 bits by torch", True), ("8 bits by Triton", False))
        }
        yield from measure_rounding(operations["pack"], ways, target, ceilings)
    yield from measure_products(operations, target, ceilings)
    yield from measure_experts(operations, target, ceilings)
    cached = torch.float8_e4m3fn if card.capability >= 89 else torch.float8_e5m2
    yield from measure_small_cache(operations, target, ceilings, cached)


def attention_of_latents(target: torch.device, ceilings: Ceilings) -> Iterator[Result]:
    from worker.kernels.cuda import table
    from worker.kernels.cuda.card import Card

    yield from measure_latent(table.bind(Card.of(target))["latent_attention"], target, ceilings)


def draws(target: torch.device, ceilings: Ceilings) -> Iterator[Result]:
    from worker.kernels.cuda.sampling.draw import draw

    yield from measure_draws(draw, target, ceilings)


SECTIONS: dict[str, tuple[float, Callable[[torch.device, Ceilings], Iterator[Result]]]] = {
    "card": (15, card),
    "right": (240, right),
    "kernels": (60, measure_kernels),
    "products": (90, products),
    "latent": (40, attention_of_latents),
    "draws": (20, draws),
    "steps": (60, measure_steps),
    "engine": (200, measure_engine),
}
"""The sections by name: the seconds after which each stops, and what it yields."""


def run(name: str, target: torch.device, ceilings: Ceilings) -> list[Result]:
    """The results of one section, as far as it came."""
    seconds, section = SECTIONS[name]
    print(f"== {name}", flush=True)
    results: list[Result] = []
    started = time.monotonic()
    try:
        for result in section(target, ceilings):
            results.append(result)
            print(result.line(), flush=True)
            if time.monotonic() - started > seconds:
                results.append(Result(name, f"stopped after {seconds:.0f} s"))
                break
    except Exception as error:  # one section cannot stop the next
        results.append(Result(name, f"{type(error).__name__}: {error}", wrong=1))
    return results


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="What this card does, beside what it could do at most.")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--out", type=Path, default=Path(), help="The folder for gpu-check.json.")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu-check: torch finds no CUDA device here, so nothing was checked")
        return NO_CARD
    target = torch.device("cuda", 0)
    torch.cuda.set_device(target)
    ceilings = measure_ceilings(target)
    found: dict[str, list[dict[str, object]]] = {}
    for name in given.only:
        found[name] = [asdict(result) for result in run(name, target, ceilings)]
        (given.out / "gpu-check.json").write_text(json.dumps(found, indent=2))
    wrong = sum(int(str(result["wrong"])) for results in found.values() for result in results)
    print(f"{wrong} wrong results")
    return min(wrong, MOST_WRONG)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
