"""Results are the same bits whatever happened: random schedules on real engines, a few of many.

`python tests/bench/same_bits.py` runs as many as one likes.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bits_lost_engines import CutProver
from bits_schedule import PLAINEST, Prover, open_engine
from bits_subjects import POOLING_TYPES, Subject, decoder, other_decoders, subjects
from bits_traffic import answers
from ranks import Layout, Ranks
from torch import Tensor

from engine_core.protocol import AddRequest
from worker.features.pooling.pooled_texts import HiddenStore
from worker.protocol import Pooling

FEW = 10
"""The conversations of each model, of which a schedule has eight."""
SMALL_CACHE = min(number for number, each in enumerate(subjects()) if "kv_cache_dtype" in each.options)
HYBRID = [each.architecture for each in subjects()].index("Qwen3_5ForCausalLM")
TEXT = [5 + number * number % 990 for number in range(330)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("same-bits")


@pytest.mark.parametrize(("numbers", "preempted"), [((0, 1, 4, 8, 9, 14), 0), ((2, 3, 6, 7, 10, 11), 1)])
def test_random_schedules(folder: Path, numbers: tuple[int, ...], preempted: int) -> None:
    """`preempted`: how many sequences are preempted at least: few schedules have a cache so small.

    Of each set one (14, 6) bounds no step's time, so it has guesses however slow the machine is.
    """
    prover = Prover(folder, conversations=FEW)
    for number in numbers:
        prover.run(number)
    tally = prover.tally
    assert tally.differences == []
    assert tally.results > 50 and tally.preemptions >= preempted and tally.cached > 0
    assert tally.held > 0


ONE_TYPE = [
    each for number, each in enumerate(other_decoders()) if number % 4 in (1, 2) or number in (16, 23, 24)
]
"""Each of the other decoders in float32 or in bfloat16, and all quantizations and caches of 8 bits."""


@pytest.mark.parametrize("subject", ONE_TYPE, ids=str)
def test_other_decoders(folder: Path, subject: Subject) -> None:
    prover = Prover(folder, conversations=FEW)
    prover.run(subjects().index(subject))
    assert prover.tally.differences == []
    assert prover.tally.results > 7


@pytest.mark.parametrize(
    ("number", "layout"),
    [
        (0, Layout(2)),
        (7, Layout(1, 2)),
        (SMALL_CACHE, Layout(2)),
        (SMALL_CACHE + 1, Layout(1, 2)),
        (HYBRID, Layout(1, 3)),
        (HYBRID + 1, Layout(1, 2)),
    ],
)
def test_schedules_on_several_ranks(folder: Path, ranks: Ranks, number: int, layout: Layout) -> None:
    prover = Prover(folder, ranks, (layout,), FEW)
    prover.run(number)
    assert prover.tally.differences == []


def test_a_bit_that_is_wrong_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants the least error where only texts that are not computed in one step would show it."""
    read = HiddenStore.read

    def read_wrongly(self: HiddenStore, block_table: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        rows = read(self, block_table, slots, positions)
        rows[:, 3] = torch.nextafter(rows[:, 3], torch.tensor(torch.inf))
        return rows

    monkeypatch.setattr(HiddenStore, "read", read_wrongly)
    prover = Prover(folder, conversations=FEW)
    for number in (0, 1, 2):
        prover.run(number)
    assert prover.tally.differences
    assert all("Pooling" in each and each.endswith("vectors") for each in prover.tally.differences)
    assert prover.tally.differences[0].startswith("schedule ")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pooling_type", POOLING_TYPES)
def test_a_pooled_text_may_be_cut_anywhere(folder: Path, pooling_type: str, dtype: str) -> None:
    subject = decoder("LlamaForCausalLM", dtype, pooling_type)
    asked = [AddRequest(id, TEXT, Pooling(task=task)) for id, task in enumerate(subject.tasks)]
    whole = vectors(folder, subject, asked, len(TEXT))
    for chunk in (1, 16, 47, 256, len(TEXT) - 1):
        assert vectors(folder, subject, asked, chunk) == whole


def vectors(folder: Path, subject: Subject, asked: list[AddRequest], chunk: int) -> list[bytes]:
    """The vectors of texts that are read in chunks of so many tokens."""
    limits = replace(PLAINEST, max_num_batched_tokens=chunk)
    with open_engine(folder, subject, limits) as engine:
        results = answers(engine, asked).values()
    return [each.vectors.data for each in results if each.vectors is not None]


# Engines that end: `python tests/bench/same_bits.py --ends` makes as many runs as one likes.


@pytest.mark.parametrize("first", [0, 1])
async def test_results_are_the_same_bits_wherever_engines_end(tmp_path: Path, first: int) -> None:
    prover = CutProver(tmp_path, requests=8)
    for number in (first, first + 2):
        await prover.run(number)
    assert prover.tally.differences == []
    assert prover.tally.results == 16 and prover.resumed > 0 and prover.ends > 0
