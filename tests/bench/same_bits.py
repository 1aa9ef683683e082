"""Proves that results are the same bits whatever happened, by random schedules on real engines.

    python tests/bench/same_bits.py [--schedules 2000] [--first 0] [--seconds 600] [--ranks 4] [--level avx2]
    python tests/bench/same_bits.py --ends [--schedules 50] [--first 0]

Tokens, log-probabilities and vectors of every request are compared with those that it has alone. A difference
is printed with the number of its schedule; `--first NUMBER --schedules 1` runs that one again. With `--ends`
engines end at random moments, and answers that had begun go on in other ones.
"""

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import transformers
from bits_lost_engines import CutProver
from bits_schedule import Prover, Tally
from ranks import Layout, Ranks

from worker.kernels.cpu import operations
from worker.kernels.cpu.library import LEVELS, levels_here

LAYOUTS = (Layout(), Layout(2), Layout(4), Layout(1, 2), Layout(2, 2))


def main() -> int:
    given = _arguments()
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    if given.level:
        levels = [level for level in levels_here() if level.name == given.level]
        operations.levels_here = lambda: levels
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="same-bits-")))
        if given.ends:
            return _end_engines(folder, given)
        ranks = Ranks(given.ranks, folder) if given.ranks else None
        if ranks is not None:
            stack.callback(ranks.stop)
        layouts = tuple(layout for layout in LAYOUTS if layout.size <= given.ranks)
        prover = Prover(folder, ranks, layouts)
        _run(prover.run, prover.tally, given)
    tally = prover.tally
    print(
        f"{tally.schedules} schedules, {tally.results} results, {tally.floats} floats, "
        f"{tally.preemptions} preemptions, {tally.cached} tokens found in the cache, "
        f"{tally.held} guesses held: "
        f"{len(tally.differences)} results differ"
    )
    return bool(tally.differences)


def _end_engines(folder: Path, given: argparse.Namespace) -> int:
    prover = CutProver(folder, requests=20)
    _run(lambda number: asyncio.run(prover.run(number)), prover.tally, given)
    print(
        f"{prover.tally.results} requests, {prover.tally.floats} floats, {prover.ends} engines ended, "
        f"{prover.resumed} answers went on in another: {len(prover.tally.differences)} differ"
    )
    return bool(prover.tally.differences)


def _run(run: Callable[[int], object], tally: Tally, given: argparse.Namespace) -> None:
    ends, told = time.monotonic() + given.seconds, 0
    for number in range(given.first, given.first + given.schedules):
        run(number)
        for difference in tally.differences[told:]:
            print(difference, flush=True)
        told = len(tally.differences)
        if time.monotonic() > ends or told >= given.most:
            break


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first schedule")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--ends", action="store_true", help="end engines while they answer")
    parser.add_argument("--most", type=int, default=50, help="stop after so many differences")
    parser.add_argument(
        "--ranks", type=int, default=0, help="rank processes; layouts of up to so many are used"
    )
    parser.add_argument(
        "--level", choices=[level.name for level in LEVELS], help="kernels, if not the best here"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
