"""Layers one by one: the piece that each rank holds, and what is refused.

That they compute what they should is shown by families beside transformers, whole and over ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import pytest
import torch
from paged import make_step
from safetensors.torch import save_file
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load, open_weights
from models.context import use_context
from models.layers.attention import Attention
from models.layers.embedding import Embedding
from models.layers.linear import Linear, RowLinear
from models.layers.mlp import activation_kind
from models.layers.norm import RMSNorm
from models.parallel.parallel import Parallel
from models.parallel.rank_shares import Span, most_ranks_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def checkpoint(folder: Path, dtype: torch.dtype = torch.float32, **tensors: Tensor) -> Weights:
    """Write a checkpoint of tensors whose names have __ for dots."""
    save_file(
        {name.replace("__", "."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return open_weights(folder, device=CPU, dtype=dtype)


Layer = TypeVar("Layer", bound=nn.Module)


def filled(layer: Layer, weights: Weights) -> Layer:
    load(layer, weights)
    return layer


class TestParallel:
    def test_shares(self) -> None:
        assert Parallel(1, 2).share(6, "things") == Span(6, 3, 6)
        assert [Parallel(rank, 4).share_kv_heads(2).start for rank in range(4)] == [0, 0, 1, 1]
        assert [Parallel(rank, 4).share_padded(300).length for rank in range(4)] == [128, 128, 44, 0]
        assert Parallel(0, 4).padded_length(300) == 128
        assert Parallel().padded_length(300) == 300
        assert Span(4, 1, 3).times(10) == Span(40, 10, 30, unit=10)

    def test_sections(self) -> None:
        """All ranks together have as many as one, each of whole heads and an even number of features."""
        for size, unit, most_ranks, sections in (
            (1536, 1, 8, 8),
            (16 * 64, 64, 8, 8),
            (9 * 64, 64, 8, 1),
            (12 * 64, 64, 8, 4),
            (8 * 3, 3, 8, 4),
            (1536, 1, 2, 2),
            (7, 1, 8, 1),
        ):
            for ranks in (1, 2, 4, 8):
                if size // unit % ranks == 0:
                    span = Parallel(ranks - 1, ranks).share(size // unit, "things").times(unit)
                    held = Parallel(ranks - 1, ranks, most_ranks=most_ranks).sections(span)
                    assert held == max(1, sections // ranks)
        assert Parallel(1, 3).sections(Parallel(1, 3).share(24, "things")) == 1

    def test_most_ranks(self) -> None:
        """As many as heads divide into, and key/value heads, of which there may be copies."""
        given = [(8, 8), (32, 2), (14, 2), (9, 3), (24, 3), (12, 12)]
        assert [most_ranks_of(*heads) for heads in given] == [8, 8, 2, 1, 1, 4]

    def test_uneven_shares_are_refused(self) -> None:
        with pytest.raises(ValueError, match="--tensor-parallel-size 2: 5 things cannot be divided evenly"):
            Parallel(0, 2).share(5, "things")
        with pytest.raises(ValueError, match="-size 4: 2 attention heads cannot be divided"):
            Parallel(0, 4).share_heads(2)
        with pytest.raises(ValueError, match="-size 3: 2 key/value heads cannot be copied evenly"):
            Parallel(0, 3).share_kv_heads(2)

    def test_each_stage_has_a_run_of_the_layers(self) -> None:
        runs = [Parallel(stage=stage, stages=3).share_layers(8) for stage in range(3)]
        assert runs == [range(3), range(3, 6), range(6, 8)]
        assert Parallel().share_layers(8) == range(8)
        runs = [Parallel(stage=stage, stages=3).share_layers(8, together=5) for stage in range(3)]
        assert runs == [range(2), range(2, 3), range(3, 8)]
        with pytest.raises(ValueError, match="--pipeline-parallel-size 3: there are 2 layers"):
            Parallel(stages=3).share_layers(2)

    def test_alone_nothing_is_exchanged(self) -> None:
        x = torch.randn(2)
        assert Parallel().all_reduce(x) is x
        assert Parallel().all_gather(x) is x

    def test_ranks_without_a_group_say_so(self) -> None:
        with pytest.raises(RuntimeError, match="rank 1 of 2 has no process group"):
            Parallel(1, 2).all_reduce(torch.zeros(1))


def test_sources_must_match_the_parts() -> None:
    with pytest.raises(ValueError, match="3 parts need as many sources, not 2"):
        Linear(4, (Span.whole(6), Span.whole(2), Span.whole(4)), sources=("q", "k"))


def test_scales_of_embeddings_are_rounded_as_they_are(tmp_path: Path) -> None:
    table = torch.randn(130, 4)
    weights = checkpoint(tmp_path, torch.bfloat16, weight=table)
    layer = filled(Embedding(130, 4, Parallel(), scale=3072**0.5), weights)
    assert torch.equal(layer(torch.tensor([1])), table[[1]].bfloat16() * 55.5)


def test_offsets_of_norms_survive_half_precision(tmp_path: Path) -> None:
    small = torch.full([4], 0.001).bfloat16()
    layer = filled(RMSNorm(4, 1e-6, offset=1.0), checkpoint(tmp_path, torch.bfloat16, weight=small))
    assert torch.equal(layer.weight, 1 + small.float())
    assert not torch.equal(layer.weight, (1 + small).float())


class Halves:
    """A group of a device that adds up in another order, and leaves the sum to the test."""

    exact = False

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


class TestSums:
    @pytest.mark.parametrize("transposed", [False, True])
    def test_rows_sum_up_with_one_bias(self, tmp_path: Path, transposed: bool) -> None:
        weight, bias, x = torch.randn(12, 4), torch.randn(12), torch.randn(3, 4)
        weights = checkpoint(tmp_path, weight=weight.T.contiguous() if transposed else weight, bias=bias)
        sums = []
        for rank in range(2):
            parallel = Parallel(rank, 2, Halves())
            span = parallel.share(4, "features")
            layer = filled(RowLinear(span, 12, parallel, bias=True, transposed=transposed), weights)
            sums.append(layer(x[:, span.start : span.stop]))
        torch.testing.assert_close(sums[0] + sums[1], x @ weight.T + bias)

    def test_sources_must_match_the_parts(self) -> None:
        with pytest.raises(ValueError, match="3 parts need as many sources, not 2"):
            Linear(4, (Span.whole(6), Span.whole(2), Span.whole(4)), sources=("q", "k"))


class TestNames:
    def test_activations(self) -> None:
        assert activation_kind("gelu_pytorch_tanh") == activation_kind("gelu_new") == "gelu_tanh"
        with pytest.raises(ValueError, match="names the activation 'swoosh'; there are silu"):
            activation_kind("swoosh")

    def test_attention_without_a_cache_says_so(self) -> None:
        attention = Attention(heads=1, kv_heads=1, head_dim=4, scale=1.0)
        x = torch.zeros(1, 4)
        with pytest.raises(RuntimeError, match="before the worker bound its cache"):
            attention(x, x, x)

    def test_heads_of_another_number_are_not_read_as_other_tokens(self) -> None:
        attention = Attention(heads=2, kv_heads=1, head_dim=4, scale=1.0)
        attention.kv = torch.zeros(2, 1, 1, 4, 4)
        q, k = torch.zeros(2, 8), torch.zeros(2, 4)
        for wrong in ((q, q, k), (q, k, q), (torch.zeros(2, 16), k, k), (q, torch.zeros(4, 4), k)):
            with pytest.raises(RuntimeError, match="shape"), use_context(make_step([2], [2], 4)):
                attention(*wrong)
