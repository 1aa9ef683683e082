"""Proves that answers go on bit by bit when engines end, by random requests to real engines.

    python tests/bench/lost_engines.py [--runs 50] [--first 0] [--requests 20]

Tokens, log-probabilities and vectors of every request are compared with those that it has alone. A difference
is printed with the number of its run; `--first NUMBER --runs 1` makes that one again.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import transformers
from bits_lost_engines import CutProver


def main() -> int:
    given = _arguments()
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    with TemporaryDirectory(prefix="lost-engines-") as folder:
        prover = CutProver(Path(folder), given.requests)
        for number in range(given.first, given.first + given.runs):
            told = len(prover.tally.differences)
            asyncio.run(prover.run(number))
            for difference in prover.tally.differences[told:]:
                print(difference, flush=True)
    tally = prover.tally
    print(
        f"{tally.results} requests, {tally.floats} floats, {prover.ends} engines ended, "
        f"{prover.resumed} answers went on in another: {len(tally.differences)} differ"
    )
    return bool(tally.differences)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--requests", type=int, default=20, help="requests of each run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
