"""Answers whose engine ends go on in another one: real engines, and the very bits of an undisturbed run.

`python tests/bench/lost_engines.py` makes as many runs as one likes.
"""

from __future__ import annotations

from pathlib import Path

from bits_lost_engines import CutProver


async def test_results_are_the_same_bits_wherever_engines_end(tmp_path: Path) -> None:
    prover = CutProver(tmp_path, requests=8)
    for number in range(4):
        await prover.run(number)
    assert prover.tally.differences == []
    assert prover.tally.results == 32 and prover.resumed > 5 and prover.ends > 10
