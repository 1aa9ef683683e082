"""The counts behind docs/scaling.md, by hand, and against a real checkpoint."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny import tiny_checkpoint


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, as a module."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return import_module("link")


def test_bytes_of_a_token(link: Any) -> None:
    """65 sums of 8 KiB; a ring of two sends each once, of four one and a half times. Then the logits."""

    def sent(name: str, *, samples: bool = False, **ranks: int) -> float:
        return link.sent_bytes(link.SHAPES["8b"], link.Way(**ranks), link.LINKS[name], samples=samples)

    assert sent("nvlink", tensor=2) == 65 * 8192
    assert sent("nvlink", tensor=4) == 65 * 8192 * 1.5
    assert sent("loopback", tensor=4) == 65 * 8192 * 3
    assert sent("nvlink", tensor=2, samples=True) == 65 * 8192 + 4 * 128256 / 2
    assert sent("nvlink", stages=4, samples=True) == 8192


@pytest.mark.parametrize("batch", [1, 32, 256])
def test_over_a_link_that_costs_nothing_nothing_is_lost(link: Any, batch: int) -> None:
    shape, device, free = link.SHAPES["8b"], link.DEVICES["h200"], link.Link(bandwidth=1e30, latency=0.0)
    tensor, stages = link.Way(tensor=4), link.Way(stages=4)
    assert link.decode_ratio(shape, device, free, tensor, batch) == pytest.approx(4)
    assert link.prefill_ratio(shape, device, free, stages) == pytest.approx(4)
    assert 0.99 < link.decode_ratio(shape, device, free, stages, batch) < 4


@pytest.mark.parametrize("tied", [True, False])
def test_shape_of_a_checkpoint(link: Any, tied: bool, tmp_path: Path) -> None:
    folder = tiny_checkpoint("LlamaForCausalLM", tmp_path, tie_word_embeddings=tied)
    tensors = load_file(folder / "model.safetensors").values()
    matrices = sum(tensor.numel() for tensor in tensors if tensor.dim() == 2)
    assert link.read_shape(folder).parameters == matrices


def test_replicas_that_share_experts(link: Any) -> None:
    """Four replicas of one rank, by hand: rows of 2,048 numbers, 8 experts of each token."""
    shape, nvlink = link.SHAPES["30b-a3b"], link.LINKS["nvlink"]
    gathered, apart = (link.Way(replicas=4, whole=True, apart=apart) for apart in (False, True))
    assert link.sent_bytes(shape, gathered, nvlink, samples=True) == 48 * 3 * (2 * 4096 + 64)
    reached = 3 * (1 - 0.75**8)
    expected = 48 * (reached * (4096 + 32) + 6 * 8192)
    assert link.sent_bytes(shape, apart, nvlink, samples=True) == pytest.approx(expected)
    free, device = link.Link(bandwidth=1e30, latency=0.0), link.DEVICES["h200"]
    ratios = [link.decode_ratio(shape, device, free, gathered, batch) for batch in (1, 32, 2048)]
    assert ratios[0] < ratios[1] < ratios[2] < 4  # each reads all but the experts itself
    assert link.prefill_ratio(shape, device, free, gathered) == pytest.approx(4, rel=0.05)


def test_whole_experts_send_as_much_and_wait_for_the_slowest_rank(link: Any) -> None:
    shape, nvlink = link.SHAPES["30b-a3b"], link.LINKS["nvlink"]
    assert shape.parameters == pytest.approx(30.5e9, rel=0.01)
    pieces, whole = link.Way(tensor=4), link.Way(tensor=4, whole=True)
    sent = [link.sent_bytes(shape, way, nvlink, samples=True) for way in (pieces, whole)]
    assert sent[0] == sent[1]
    one, many = (link.route(128, 8, rows, 4, True) for rows in (1, 2048))
    assert one.touched == one.choices
    assert 2 < one.choices < 8  # a quarter of eight, and more on the rank that has the most
    assert many.touched == 32
    assert 4096 < many.choices < 4400
    assert link.route(128, 8, 1, 4, False) == link.Routed(2, 2)
    for batch in (1, 32, 256):
        ratios = [
            link.decode_ratio(shape, link.DEVICES["h200"], nvlink, way, batch) for way in (pieces, whole)
        ]
        assert ratios[1] < ratios[0]
