"""Real ranks of replicas that share experts: one worker's tokens, and bits that depend on no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from mixtures import FAMILIES
from ranks import Layout, Ranks
from replica_texts import SIZES, run
from tiny import tiny_checkpoint

from models.parallel.experts import Placement, Transport


@pytest.mark.turns
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("transport", ["allgather_reducescatter", "all_to_all"])
def test_replicas_have_the_tokens_of_one_worker(
    family: str, transport: Transport, ranks: Ranks, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(family, tmp_path, **FAMILIES[family])
    alone = [run(ranks, folder, Layout(), [size])[0] for size in SIZES[:1]]
    for tensor, replicas in ((1, 2), (1, 4), (2, 2)):
        found = run(ranks, folder, Layout(tensor, 1, "linear", transport, replicas))
        assert found[0].tokens == alone[0].tokens
        assert found[0].logprobs == pytest.approx(alone[0].logprobs, abs=1e-4)


@pytest.mark.turns
@pytest.mark.parametrize("transport", ["allgather_reducescatter", "all_to_all"])
def test_bits_depend_on_no_other_replica(transport: Transport, ranks: Ranks, tmp_path: Path) -> None:
    folder = tiny_checkpoint("Qwen2MoeForCausalLM", tmp_path, **FAMILIES["Qwen2MoeForCausalLM"])
    layout = Layout(1, 1, "linear", transport, 2)
    expected = run(ranks, folder, layout, [7, 2])[0]
    for sizes in ([5, 17], [23, 1]):
        found = run(ranks, folder, layout, sizes)[0]
        assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)


@pytest.mark.turns
@pytest.mark.parametrize("family", FAMILIES)
def test_what_returns_apart_has_the_same_bits_wherever_experts_lie(
    family: str, ranks: Ranks, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(family, tmp_path, **FAMILIES[family])
    layouts: list[tuple[int, int, Placement]] = [
        *((1, 4, "linear"), (1, 4, "round_robin"), (2, 2, "linear"), (4, 1, "round_robin"))
    ]
    results = [
        run(ranks, folder, Layout(tensor, 1, placement, "all_to_all", replicas))[0]
        for tensor, replicas, placement in layouts
    ]
    for found in results[1:]:
        assert (found.tokens, found.logprobs) == (results[0].tokens, results[0].logprobs)
