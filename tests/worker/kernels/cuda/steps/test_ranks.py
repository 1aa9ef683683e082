"""Ranks replay their steps, with sums over those that share layers: real processes, a stand-in for graphs.

Their exchanges are recorded as one of a graph's calls. Those of the host carry them, in the place of NCCL.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import graph_rank
import pytest
from interpreted_device import ON_A_CARD
from ranks import Layout, Ranks, RanksOfTests, make
from replayed import generated
from tiny import tiny_checkpoint

from engine_core.protocol import AddRequest
from worker.protocol import Sampling

SHARED = [5, 6, 7, 8, 9, 10, 11, 12]
REQUESTS = [
    AddRequest(0, [*SHARED, 40], Sampling(max_tokens=5, temperature=0)),
    AddRequest(1, [41, 42], Sampling(max_tokens=6, temperature=0.8, top_p=0.9, seed=7)),
    AddRequest(
        2, [*SHARED, 43], Sampling(max_tokens=2, temperature=0.9, seed=9, logprobs=2, logit_bias={3: 4.0})
    ),
    AddRequest(3, [*SHARED, 40], Sampling(max_tokens=3, temperature=0.7, seed=1)),
]
MOST_TOKENS = 3
FORMS = 3 + 1 + 3 + 1
"""Graphs of 3, 2 and 1 rows and of 3 tokens up to tokens, then up to logits, and up to hidden states."""

pytestmark = pytest.mark.skipif(ON_A_CARD, reason="two ranks need two cards")

Run = Callable[..., tuple[dict[int, list[int]], list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("Qwen3ForCausalLM", tmp_path_factory.mktemp("qwen3"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ranks, Path]]:
    """The processes of two ranks, and the folder with their plan and reports."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = Ranks(2, folder, graph_rank.__file__, str(folder))
    yield ranks, folder
    ranks.stop()


@pytest.fixture
def run(folder: Path, ranks: tuple[Ranks, Path]) -> Run:
    """A function that runs all requests on two ranks; returns tokens, and the ranks' reports."""
    processes, own = ranks

    def run(
        steps_ahead: int, layout: Layout = Layout(2), **fails: object
    ) -> tuple[dict[int, list[int]], list[dict[str, Any]]]:
        (own / "plan.json").write_text(json.dumps({"most_tokens": MOST_TOKENS, **fails}))
        made: list[RanksOfTests] = []
        tokens, _ = generated(
            folder,
            REQUESTS,
            make(processes, layout, made),
            steps_ahead=steps_ahead,
            tensor_parallel_size=layout.tensor,
            pipeline_parallel_size=layout.stages,
            max_num_batched_tokens=MOST_TOKENS,
        )
        return tokens, [json.loads((own / f"{rank}.json").read_text()) for rank in range(2)]

    return run


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, list[int]]:
    return generated(folder, REQUESTS, max_num_batched_tokens=MOST_TOKENS)[0]


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_tokens_are_those_of_one_rank(expected: dict[int, list[int]], run: Run, steps_ahead: int) -> None:
    tokens, reports = run(steps_ahead)
    assert tokens == expected
    first, second = reports
    assert first["captured"] == second["captured"] == FORMS
    assert first["replayed"] == second["replayed"], "all ranks choose the same graphs"
    assert set(first["replayed"]) & {0, 1, 2}, "steps were replayed to their tokens"
    assert 3 in first["replayed"], "and steps with prompts"
    assert set(first["replayed"]) & {4, 5, 6} and 7 in first["replayed"], "and steps up to their logits"
    assert first["alive"] == second["alive"] == 0, "NCCL closes no group that graphs refer to"


def test_what_does_not_fit_on_one_rank_is_left_out_on_all(expected: dict[int, list[int]], run: Run) -> None:
    """The second rank has no memory to rehearse one form, and the first none to capture another."""
    fails = {"1": {"rehearsals": [0]}, "0": {"captures": [5]}}
    tokens, (first, second) = run(1, **fails)
    assert tokens == expected
    assert (first["captured"], second["captured"]) == (FORMS - 2, FORMS - 1), "one was captured for nothing"
    without = {second["captured"] - FORMS + 5}  # the number of that one on the second rank
    assert first["replayed"] and not without & set(second["replayed"])


def test_stages_replay_what_lies_between_their_exchanges(expected: dict[int, list[int]], run: Run) -> None:
    """The stream comes before a replay and goes after it; the last stage chooses, and sends tokens back."""
    tokens, (first, last) = run(1, Layout(1, 2))
    assert tokens == expected
    assert first["captured"] == last["captured"] == FORMS
    assert set(first["replayed"]) <= {4, 5, 6, 7}, "it goes up to the stream, and made each twice"
    for replayed in (first["replayed"], last["replayed"]):
        assert set(replayed) & {4, 5, 6} and 7 in replayed
    assert set(last["replayed"]) & {0, 1, 2} and 3 in last["replayed"]
    assert len(first["replayed"]) == len(last["replayed"])
    assert first["alive"] == last["alive"] == 0
