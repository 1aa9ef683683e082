"""Layers one by one: the piece that each rank holds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from drive import ThreadGroup
from paged import make_step
from safetensors.torch import save_file
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load, open_weights
from models.context import use_context
from models.layers.attention import Attention
from models.layers.embedding import Embedding, LMHead
from models.layers.linear import Linear, RowLinear
from models.layers.mlp import activation_kind
from models.layers.norm import RMSNorm, SpreadRMSNorm
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


class TestLinear:
    """Linear layers in each layout of a checkpoint, whole and cut for two ranks, compared with x W^T + b."""

    WEIGHT, BIAS = torch.arange(12.0 * 4).view(12, 4), torch.arange(100.0, 112)
    PARTS = (Span.whole(6), Span.whole(2), Span.whole(4))

    @staticmethod
    def cut(rank: int) -> list[Span]:
        return [Parallel(rank, 2).share(part.size, "features") for part in TestLinear.PARTS]

    def check(self, weights: Weights, sources: tuple[str, ...] = (), transposed: bool = False) -> None:
        x = torch.randn(3, 4)
        q, k, v = (x @ self.WEIGHT.T + self.BIAS).split([6, 2, 4], dim=-1)
        whole = Linear(4, self.PARTS, bias=True, sources=sources, transposed=transposed)
        torch.testing.assert_close(filled(whole, weights)(x), torch.cat([q, k, v], dim=-1))
        for rank in range(2):
            part = Linear(4, self.cut(rank), bias=True, sources=sources, transposed=transposed)
            assert part.widths == [3, 1, 2]
            mine = [piece.chunk(2, dim=-1)[rank] for piece in (q, k, v)]
            torch.testing.assert_close(filled(part, weights)(x), torch.cat(mine, dim=-1))
            assert part.weight.is_contiguous()

    def test_one_tensor(self, tmp_path: Path) -> None:
        weights = checkpoint(tmp_path, a__qkv__weight=self.WEIGHT, a__qkv__bias=self.BIAS)
        self.check(weights / "a" / "qkv")

    def test_one_transposed_tensor(self, tmp_path: Path) -> None:
        weights = checkpoint(tmp_path, qkv__weight=self.WEIGHT.T.contiguous(), qkv__bias=self.BIAS)
        self.check(weights / "qkv", transposed=True)

    def test_a_tensor_for_each_part(self, tmp_path: Path) -> None:
        tensors = {}
        for name, weight, bias in zip(
            "qkv", self.WEIGHT.split([6, 2, 4]), self.BIAS.split([6, 2, 4]), strict=True
        ):
            tensors |= {f"a__{name}__weight": weight.contiguous(), f"a__{name}__bias": bias.contiguous()}
        self.check(checkpoint(tmp_path, **tensors) / "a" / "qkv", sources=("q", "k", "v"))

    @pytest.mark.parametrize("transposed", [False, True])
    def test_rows_sum_up_with_one_bias(self, tmp_path: Path, transposed: bool) -> None:
        stored = self.WEIGHT.T.contiguous() if transposed else self.WEIGHT
        weights = checkpoint(tmp_path, weight=stored, bias=self.BIAS)
        x = torch.randn(3, 4)
        sums = []
        for rank in range(2):
            parallel = Parallel(rank, 2, Recorder())
            span = parallel.share(4, "features")
            layer = filled(RowLinear(span, 12, parallel, bias=True, transposed=transposed), weights)
            sums.append(layer(x[:, span.start : span.stop]))
        torch.testing.assert_close(sums[0] + sums[1], x @ self.WEIGHT.T + self.BIAS)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("bias", [False, True])
    def test_any_number_of_ranks_gives_the_same_bits(
        self, tmp_path: Path, dtype: torch.dtype, bias: bool
    ) -> None:
        tensors = {"weight": torch.randn(12, 208), "bias": torch.randn(12)}
        weights = checkpoint(tmp_path, dtype, **tensors if bias else {"weight": tensors["weight"]})
        x = torch.randn(3, 208).to(dtype)

        def product(ranks: int) -> Tensor:
            group = ThreadGroup(ranks)

            def run(rank: int) -> Tensor:
                parallel = Parallel(rank, ranks, group.at(rank))
                span = parallel.share(208, "features")
                layer = filled(RowLinear(span, 12, parallel, bias=bias), weights)
                return layer(x[:, span.start : span.stop])

            with ThreadPoolExecutor(ranks) as pool:
                first, *others = pool.map(run, range(ranks))
            assert all(torch.equal(other, first) for other in others)
            return first

        whole = product(1)
        exact = x.double() @ tensors["weight"].to(dtype).double().t()
        exact = exact + tensors["bias"].to(dtype).double() if bias else exact
        torch.testing.assert_close(whole, exact.to(dtype))
        for ranks in (2, 4, 8):
            assert torch.equal(product(ranks), whole), ranks

    def test_sources_must_match_the_parts(self) -> None:
        with pytest.raises(ValueError, match="3 parts need as many sources, not 2"):
            Linear(4, self.PARTS, sources=("q", "k"))


class Recorder:
    """A group that leaves the sum to the test."""

    exact = False

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


class TestVocabulary:
    """The vocabulary on three ranks, each with a multiple of 64 rows: the last holds two, and padding."""

    TABLE = torch.randn(130, 4)

    def test_embedding(self, tmp_path: Path) -> None:
        weights = checkpoint(tmp_path, weight=self.TABLE)
        ids = torch.tensor([129, 0, 64, 63, 5])
        parts = [filled(Embedding(130, 4, Parallel(rank, 3, Recorder())), weights)(ids) for rank in range(3)]
        assert torch.equal(torch.stack(parts).sum(0), self.TABLE[ids])
        assert torch.equal(filled(Embedding(130, 4, Parallel()), weights)(ids), self.TABLE[ids])

    def test_scale_is_rounded_as_the_embeddings_are(self, tmp_path: Path) -> None:
        weights = checkpoint(tmp_path, torch.bfloat16, weight=self.TABLE)
        layer = filled(Embedding(130, 4, Parallel(), scale=3072**0.5), weights)
        assert torch.equal(layer(torch.tensor([1])), self.TABLE[[1]].bfloat16() * 55.5)

    def test_head_is_as_wide_as_the_vocabulary(self, tmp_path: Path) -> None:
        weights = checkpoint(tmp_path, torch.bfloat16, weight=self.TABLE)
        hidden = torch.randn(2, 4).bfloat16()
        parts = [filled(head(Parallel(rank, 3, Recorder())), weights)(hidden) for rank in range(3)]
        assert [part.shape for part in parts] == [(2, 64)] * 3
        logits = filled(head(Parallel()), weights)(hidden)
        assert logits.dtype == torch.float32
        assert torch.equal(torch.cat(parts, dim=-1)[:, :130], logits)

    @pytest.mark.parametrize("tied", [True, None])
    def test_tied_head_reads_nothing(self, tmp_path: Path, tied: bool | None) -> None:
        embedding = filled(Embedding(130, 4, Parallel()), checkpoint(tmp_path, weight=self.TABLE))
        lent = filled(LMHead(130, 4, Parallel(), embedding=embedding, tied=tied), checkpoint(tmp_path))
        assert lent.weight is embedding.weight
        assert list(lent.children()) == []

    def test_head_of_its_own_where_nobody_said_tied(self, tmp_path: Path) -> None:
        own = filled(head(Parallel(), tied=None), checkpoint(tmp_path, weight=self.TABLE))
        assert torch.equal(own.weight, self.TABLE)


def head(parallel: Parallel, tied: bool | None = False) -> LMHead:
    return LMHead(130, 4, parallel, embedding=Embedding(130, 4, parallel), tied=tied)


class TestNorms:
    def test_offset_survives_half_precision(self, tmp_path: Path) -> None:
        small = torch.full([4], 0.001).bfloat16()
        layer = filled(RMSNorm(4, 1e-6, offset=1.0), checkpoint(tmp_path, torch.bfloat16, weight=small))
        assert torch.equal(layer.weight, 1 + small.float())
        assert not torch.equal(layer.weight, (1 + small).float())

    def test_spread_over_ranks_with_copies(self, tmp_path: Path) -> None:
        """Two heads of three features, each held by two of four ranks."""
        weights = checkpoint(tmp_path, weight=torch.randn(6))
        x = torch.randn(5, 6)
        whole = filled(SpreadRMSNorm(Span.whole(6), 1e-5, Parallel()), weights)(x)
        squares = x.square().sum(-1, keepdim=True) * 2  # the sum over four ranks
        for rank in range(4):
            parallel = Parallel(rank, 4, Fixed(squares))
            span = parallel.share_kv_heads(2).times(3)
            mine = filled(SpreadRMSNorm(span, 1e-5, parallel), weights)(x[:, span.start : span.stop])
            torch.testing.assert_close(mine, whole[:, span.start : span.stop])


class Fixed(Recorder):
    """A group whose sum is known."""

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.total


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
