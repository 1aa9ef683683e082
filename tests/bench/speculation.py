"""What guesses gain for known texts: real steps of a model, with the texts' tokens in place of sampled ones.

    python tests/bench/speculation.py MODEL [--repository FOLDER] [--methods ngram suffix] [--at-once 1 8 32]
    python tests/bench/speculation.py MODEL --contexts 256 4096 --texts edits --at-once 1

Texts are `edits` (the old file is the prompt, the new one the answer, from the history of a git repository),
`continued` (the second half of a file after its first), `alike` (variations of a few answers) and `random`
(tokens without any order). The weights of MODEL may be random: only its steps count. Rounds with and without
guesses alternate in one process, and medians count. With `--contexts`, steps of one sequence behind so many
tokens are timed first, by their rows (`draft_rows.py`). States of hybrids go on by the guesses that hold.
"""

import argparse
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draft_rows import measure_rows
from msgspec.structs import replace
from tokenizers import Tokenizer

from engine_core.config import EngineConfig
from engine_core.engine import Engine
from engine_core.executor import InlineExecutor, StepFuture
from engine_core.features.speculation.drafts import Drafts
from engine_core.features.speculation.speculator import Speculator
from engine_core.options.speculation_options import SpeculationOptions
from engine_core.protocol import AddRequest, Tokens
from models.checkpoint.hub import DEMO
from server.options.option_parsing import assemble
from worker.features.states import speculated_states
from worker.protocol import Sampling, SeqStep, StepInput, StepOutput

Text = tuple[list[int], list[int]]
"""A prompt, and its answer."""

_LONGEST = 1536


class ReplayingExecutor(InlineExecutor):
    """Runs all steps, and gives the tokens of known texts in place of those that were sampled.

    The worker goes on from the tokens that it has sampled itself, whose number and places are the same.
    """

    texts: dict[int, list[int]]
    """The first token of a prompt -> it and its answer. First tokens differ."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.texts = {}
        self._slots: dict[int, list[int]] = {}

    def submit(self, step: StepInput) -> StepFuture:
        for new in step.new:
            self._slots[new.slot] = self.texts[new.tokens[0]]
        return _Replayed(super().submit(step), step, [self._slots[row.slot] for row in step.seqs])

    def count_held(self, seq: SeqStep, slots: object) -> int:
        """How many guesses of a sequence hold, by its text."""
        return seq.count_held(self._slots[seq.slot][seq.start + seq.count :])


@dataclass
class _Replayed:
    future: StepFuture
    step: StepInput
    texts: list[list[int]]

    def done(self) -> bool:
        return self.future.done()

    def result(self) -> StepOutput:
        output, held = self.future.result(), dict[int, list[int]]()
        tokens = list(output.tokens)
        for at, (row, text) in enumerate(zip(self.step.seqs, self.texts, strict=True)):
            if row.samples:
                next_at = row.start + row.count
                for guess in row.guesses:
                    if guess != text[next_at]:
                        break
                    held.setdefault(row.slot, []).append(guess)
                    next_at += 1
                tokens[at] = text[next_at]
        return replace(output, tokens=tokens, held=held)


@dataclass
class Round:
    """What became of one replay of all texts."""

    tokens: int = 0
    seconds: float = 0.0
    guessing: float = 0.0
    """The seconds in the guesser."""
    calls: int = 0
    """The sequences of all steps that landed."""
    landed: int = 0
    """The tokens of all answers behind their first ones."""


@dataclass
class Timed:
    """Counts the seconds that methods of a guesser take."""

    seconds: float = 0.0
    sequences: int = 0
    methods: tuple[str, ...] = field(default=("enter", "follow", "pays", "choose", "landed", "leave"))

    def wrap(self, guesser: Speculator) -> None:
        for name in self.methods:
            setattr(guesser, name, self._timed(getattr(guesser, name), counts=name == "follow"))

    def _timed(self, method: Callable[..., Any], *, counts: bool) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*given)
            finally:
                self.seconds += time.perf_counter() - began
                self.sequences += counts

        return run


def replay(
    engine: Engine, executor: ReplayingExecutor, texts: list[Text], at_once: int, timed: Timed
) -> Round:
    """Run all texts, so many at a time; what counts is the time in which nobody waits for a first token."""
    round, waiting = Round(), list(enumerate(texts))[::-1]
    guessing, sequences = timed.seconds, timed.sequences
    live, unbegun = set[int](), set[int]()
    while waiting or live:
        while waiting and len(live) < at_once:
            id, (prompt, answer) = waiting.pop()
            prompt = [id + 3, *prompt]  # so that the executor knows it
            executor.texts[prompt[0]] = prompt + answer
            engine.add(0, AddRequest(id, prompt, Sampling(max_tokens=len(answer), temperature=0)))
            live.add(id)
            unbegun.add(id)
        counts, began = not unbegun, time.perf_counter()
        outputs = engine.step().get(0, [])
        seconds = time.perf_counter() - began
        for output in outputs:
            assert isinstance(output, Tokens), output
            unbegun.discard(output.id)
            if output.finish:
                live.discard(output.id)
            round.tokens += counts * len(output.tokens)
        round.seconds += counts * seconds
    round.guessing, round.calls = timed.seconds - guessing, timed.sequences - sequences
    round.landed = sum(len(answer) - 1 for _, answer in texts)
    return round


def texts_of(repository: Path, vocabulary: int, count: int) -> dict[str, list[Text]]:
    """So many texts of each kind, the edits of a repository among them."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    rng, edits, continued = random.Random(1), list[Text](), list[Text]()

    def git(*command: str) -> str:
        ran = subprocess.run(["git", "-C", str(repository), *command], capture_output=True, check=True)
        return ran.stdout.decode(errors="replace")

    commits = git("log", "--no-merges", "--format=%H", "-n", "1000").split()[:-1]
    rng.shuffle(commits)
    for commit in commits:
        changed = git("diff", "--name-only", "--diff-filter=M", f"{commit}^", commit).split("\n")
        names = [name for name in changed if name.endswith((".py", ".md"))]
        if not names or len(edits) >= count:
            continue
        name = rng.choice(names)
        old, new = (tokenizer.encode(git("show", f"{each}:{name}")).ids for each in (f"{commit}^", commit))
        if 150 < len(old) < _LONGEST and len(new) > 100:
            edits.append((old, new[:400]))
            continued.append((new[: len(new) // 2], new[len(new) // 2 :][:300]))
    kinds = [answer[:150] for _, answer in edits[:8]]
    alike = [
        (
            [rng.randrange(5, vocabulary) for _ in range(100)],
            [rng.randrange(5, vocabulary) if rng.random() < 0.08 else token for token in rng.choice(kinds)],
        )
        for _ in range(count)
    ]
    drawn = [[rng.randrange(5, vocabulary) for _ in range(352)] for _ in range(count)]
    return {
        "edits": edits,
        "continued": continued,
        "alike": alike,
        "random": [(each[:256], each[256:]) for each in drawn],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--repository", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--methods", nargs="+", default=["ngram", "suffix"])
    parser.add_argument("--texts", nargs="+", default=["edits", "continued", "alike", "random"])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--count", type=int, default=8, help="texts at a time, or as many as run at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=8)
    parser.add_argument("--match", type=int, nargs=2, default=[2, 5])
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--contexts", type=int, nargs="+")
    given = parser.parse_args()
    if given.contexts:
        measure_rows(given.model, given.contexts, [1, 5, 9], 40, given.quantization)
    config = assemble(
        EngineConfig,
        {
            "model": given.model,
            "device": "cpu",
            "dtype": given.dtype,
            "quantization": given.quantization,
            "load_format": "dummy",
            "max_model_len": 2048,
            "max_num_seqs": max(given.at_once),
            "enable_prefix_caching": False,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": given.most},
        },
    )
    executors: list[ReplayingExecutor] = []

    def make(*made_of: Any) -> ReplayingExecutor:
        executors.append(ReplayingExecutor(*made_of))
        return executors[0]

    engine = Engine.start(config, lambda progress: None, make)
    speculated_states._count_held = executors[0].count_held  # pyright: ignore[reportPrivateUsage]
    texts = texts_of(given.repository, engine.ready.vocab_size, max(given.count, *given.at_once))
    print("| text | at once | method | tokens/s without | ratio | tokens a step | us a sequence and step |")
    print("|---|---:|---|---:|---:|---:|---:|", flush=True)
    for name in given.texts:
        for at_once in given.at_once:
            measure(engine, executors[0], name, texts[name][: max(given.count, at_once)], at_once, given)
    engine.stop()


def new_guesser(engine: Engine, method: str, given: argparse.Namespace) -> Speculator:
    """A guesser that knows nothing yet; with the method `none` it never guesses."""
    least, most = given.match
    options = SpeculationOptions(
        method="suffix" if method == "suffix" else "ngram",
        most=given.most,
        most_sequences=-1 if method == "none" else None,
        least_match=least,
        most_match=most,
    )
    line = engine._scheduler.pace.step_time  # pyright: ignore[reportPrivateUsage]
    return Speculator(options, engine.ready.worker, line, lambda seq: [])


def measure(
    engine: Engine,
    executor: ReplayingExecutor,
    name: str,
    texts: list[Text],
    at_once: int,
    given: argparse.Namespace,
) -> None:
    """Replay texts with each method and without, in turns, and print a row of the table for each."""
    drafts = engine._scheduler.hooks.find(Drafts)  # pyright: ignore[reportPrivateUsage]
    assert drafts is not None
    found: dict[str, list[Round]] = {method: [] for method in ("none", *given.methods)}
    for _ in range(given.rounds):
        for method, rounds in found.items():
            guesser, timed = new_guesser(engine, method, given), Timed()
            if method != "none":
                timed.wrap(guesser)
            drafts._guesser = guesser  # pyright: ignore[reportPrivateUsage]
            rounds.append(replay(engine, executor, texts, at_once, timed))
    plain = statistics.median(each.tokens / each.seconds for each in found["none"])
    for method in given.methods:
        ratio = statistics.median(
            one.tokens / one.seconds / (other.tokens / other.seconds)
            for one, other in zip(found[method], found["none"], strict=True)
        )
        calls = max(1, sum(each.calls for each in found[method]))
        per_step = sum(each.landed for each in found[method]) / calls
        micro = 1e6 * sum(each.guessing for each in found[method]) / calls
        print(f"| {name} | {at_once} | {method} | {plain:.1f} | {ratio:.2f} | {per_step:.2f} | {micro:.1f} |")


if __name__ == "__main__":
    main()
