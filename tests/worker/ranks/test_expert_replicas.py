"""Real ranks of replicas that share experts: one worker's tokens, and bits that depend on no other."""

from pathlib import Path

import pytest
from mixtures import FAMILIES
from ranks import Layout, Ranks
from replica_texts import SIZES, run
from tiny import tiny_checkpoint

from models.parallel.experts import Placement, Transport
from worker.config import Balancing


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


@pytest.mark.parametrize("transport", ["allgather_reducescatter", "all_to_all"])
def test_bits_depend_on_no_other_replica(transport: Transport, ranks: Ranks, tmp_path: Path) -> None:
    folder = tiny_checkpoint("Qwen2MoeForCausalLM", tmp_path, **FAMILIES["Qwen2MoeForCausalLM"])
    layout = Layout(1, 1, "linear", transport, 2)
    expected = run(ranks, folder, layout, [7, 2])[0]
    for sizes in ([5, 17], [23, 1]):
        found = run(ranks, folder, layout, sizes)[0]
        assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)


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


# Experts that are copied and moved by load.


LENGTH = 9


def balancing(copies: int, use_async: bool) -> Balancing:
    """Load is measured before the steps 1, 4, 7, ..., when some replicas are done and idle."""
    return Balancing(num_redundant_experts=copies, window_size=4, step_interval=3, use_async=use_async)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_same_before_during_and_after_moves(
    family: str, ranks: Ranks, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(family, tmp_path, **FAMILIES[family])
    fixed = run(ranks, folder, Layout(1, 1, "linear", "all_to_all", 4), length=LENGTH)
    for tensor, replicas, use_async in ((2, 1, True), (1, 2, False), (1, 4, True), (2, 2, True)):
        layout = Layout(tensor, 1, "linear", "all_to_all", replicas)
        found = run(ranks, folder, layout, length=LENGTH, balancing=balancing(tensor * replicas, use_async))
        for text, expected in zip(found, fixed, strict=False):
            assert (text.tokens, text.logprobs) == (expected.tokens, expected.logprobs)
        rearranged = sum(len(report.rearrangements) for report in found[0].reports)
        assert rearranged >= 1
        measured = [report.balancedness for report in found[0].reports if report.balancedness]
        assert len(measured) > 2
        assert all(1 / layout.size / replicas <= each.least <= each.p90 <= each.p50 <= 1 for each in measured)


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "int8-dynamic"])
def test_packed_bytes_move_in_every_form(quantization: str | None, ranks: Ranks, tmp_path: Path) -> None:
    family = "Qwen2MoeForCausalLM"
    folder = tiny_checkpoint(family, tmp_path, **FAMILIES[family])
    options = {"dtype": "bfloat16", "quantization": quantization}
    layout = Layout(1, 1, "linear", "all_to_all", 2)
    fixed = run(ranks, folder, layout, length=LENGTH, options=options)
    found = run(ranks, folder, layout, length=LENGTH, options=options, balancing=balancing(2, True))
    for text, expected in zip(found, fixed, strict=True):
        assert (text.tokens, text.logprobs) == (expected.tokens, expected.logprobs)
    assert sum(len(report.rearrangements) for report in found[0].reports) >= 1
