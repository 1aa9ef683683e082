"""What a step takes by the rows of one sequence, which are one token and guesses behind it; a table.

    python tests/bench/draft_rows.py MODEL [--contexts 256 4096] [--rows 1 5 9] [--quantization int8]

In each turn every number of rows has a step at the same place, so a machine that is busy for a while slows
all of them down; the least and the median count.
"""

import argparse
import statistics
import time
from pathlib import Path

from models.config import read_config
from models.conversion.conversion_choice import Conversion
from worker.config import WorkerConfig
from worker.options import WorkerOptions
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput
from worker.runner import Runner

_BLOCK = 32


def _open(folder: str, longest: int, quantization: str | None) -> Runner:
    model = read_config(Path(folder))
    served_as = Conversion(runner="generate", convert="none", architecture=model.architecture)
    sizes = {"max_num_seqs": 4, "block_size": _BLOCK, "max_model_len": longest + 64, "dtype": "bfloat16"}
    options = WorkerOptions(quantization=quantization, device="cpu", **sizes)  # pyright: ignore[reportArgumentType]
    config = WorkerConfig(
        folder=folder,
        model=model,
        conversion=served_as,
        options=options,
        tasks=("generate",),
        guesses=True,
    )
    return Runner(config, lambda phase, fraction: None)


def _read(runner: Runner, context: int) -> None:
    tokens = [5 + 7 * at % 1000 for at in range(context)]
    new = [NewSeq(0, tokens, context, Sampling(max_tokens=64, temperature=0))]
    for start in range(0, context, 1024):
        count = min(1024, context - start)
        behind = 64 if start + count == context else 0
        gained = -(-(start + count + behind) // _BLOCK) - -(-start // _BLOCK)
        first = -(-start // _BLOCK)
        row = SeqStep(0, start, count, list(range(first, first + gained)), samples=start + count == context)
        runner.launch(StepInput(1, new, [row])).result()
        new = []


def _seconds(runner: Runner, context: int, rows: int) -> float:
    step = StepInput(2, [], [SeqStep(0, context, 1, [], True, 1, guesses=[9] * (rows - 1))])
    started = time.perf_counter()
    runner.launch(step).result()
    return time.perf_counter() - started


def measure_rows(
    folder: str, contexts: list[int], rows_of_steps: list[int], turns: int, quantization: str | None
) -> None:
    """Print a row of the table for each context and number of rows."""
    runner = _open(folder, max(contexts), quantization)
    print("| context | rows | least ms | median ms | by one row |\n|---:|---:|---:|---:|---:|")
    for context in contexts:
        _read(runner, context)
        found: dict[int, list[float]] = {rows: [] for rows in rows_of_steps}
        for _ in range(turns):
            for rows, own in found.items():
                own.append(_seconds(runner, context, rows))
        one = min(found[rows_of_steps[0]])
        for rows, own in found.items():
            least, median = min(own), statistics.median(own)
            print(f"| {context} | {rows} | {least * 1e3:.2f} | {median * 1e3:.2f} | {least / one:.2f} |")
    runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 4096])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 9])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--quantization", choices=["int8", "int4"])
    given = parser.parse_args()
    measure_rows(given.model, given.contexts, given.rows, given.turns, given.quantization)


if __name__ == "__main__":
    main()
