"""The reference operations, compared with formulas written out, in float64 where that shows more."""

from collections.abc import Iterator

import pytest
import torch
from paged import make_cache, make_step
from torch import Tensor

from models import ops
from models.context import ForwardContext
from models.layers.linear import Linear
from models.ops import reference
from models.ops.attention_inputs import HeadPrep

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class TestAttention:
    """Attention of three sequences: a whole prompt, a continued one, and one that decodes."""

    NEW, TOTAL = [7, 5, 1], [7, 16, 11]

    @pytest.fixture
    def step(self) -> ForwardContext:
        return make_step(self.NEW, self.TOTAL, BLOCK)

    @pytest.fixture
    def kv(self, step: ForwardContext) -> Tensor:
        """A cache that is filled up to the end of each sequence, and NaN beyond."""
        return make_cache(step, KV_HEADS, DIM, torch.float32)

    @pytest.mark.parametrize("softcap", [None, 0.7])
    @pytest.mark.parametrize("window", [None, 1, 3, 5, 100])
    def test_equals_the_formula(
        self, step: ForwardContext, kv: Tensor, window: int | None, softcap: float | None
    ) -> None:
        q = torch.randn(sum(self.NEW), HEADS, DIM)
        out = ops.attention(q, kv, step, scale=0.4, window=window, softcap=softcap)
        expected = torch.stack(
            [
                self.token(q[token], kv, step, row, position, window, softcap)
                for token, (row, position) in enumerate(self.places())
            ]
        )
        torch.testing.assert_close(out, expected)

    def places(self) -> Iterator[tuple[int, int]]:
        for row, (new, total) in enumerate(zip(self.NEW, self.TOTAL, strict=True)):
            for position in range(total - new, total):
                yield row, position

    def token(
        self,
        q: Tensor,
        kv: Tensor,
        step: ForwardContext,
        row: int,
        position: int,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attention of one token from the definition: [HEADS, DIM]."""
        seen = range(0 if window is None else max(0, position - window + 1), position + 1)
        held = torch.stack([kv[:, int(step.block_table[row, p // BLOCK]), :, p % BLOCK] for p in seen], dim=2)
        keys, values = held.double().repeat_interleave(HEADS // KV_HEADS, dim=1)  # [HEADS, seen, DIM]
        scores = (keys @ q.double().unsqueeze(-1)).squeeze(-1) * 0.4  # [HEADS, seen]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        return (scores.softmax(-1).unsqueeze(1) @ values).squeeze(1).float()

    def test_half_precision_stays_near(self, step: ForwardContext, kv: Tensor) -> None:
        q = torch.randn(sum(self.NEW), HEADS, DIM)
        for softcap in (None, 0.7):
            exact = ops.attention(q, kv, step, scale=0.4, softcap=softcap)
            half = ops.attention(q.bfloat16(), kv.bfloat16(), step, scale=0.4, softcap=softcap)
            assert half.dtype == torch.bfloat16
            torch.testing.assert_close(half.float(), exact, atol=0.03, rtol=0)


class TestRotaryAndCache:
    def test_writes_the_slots_of_the_step_and_no_others(self) -> None:
        step = make_step([3, 2], [3, 9], BLOCK)
        q, k, v = torch.randn(5, HEADS, DIM), torch.randn(5, KV_HEADS, DIM), torch.randn(5, KV_HEADS, DIM)
        kv = torch.full((2, 20, KV_HEADS, BLOCK, DIM), torch.nan)
        assert torch.equal(ops.rotary_and_cache(q, k, v, kv, step), q)
        flat = kv.transpose(2, 3).flatten(1, 2)  # [2, slots, KV_HEADS, DIM]
        assert torch.equal(flat[:, step.slot_mapping], torch.stack([k, v]))
        assert int((~flat.isnan()).sum()) == k.numel() + v.numel()

    def test_norms_come_before_rotation_and_values_stay(self) -> None:
        step = make_step([4], [4], BLOCK)
        q, k, v = torch.randn(4, HEADS, DIM), torch.randn(4, KV_HEADS, DIM), torch.randn(4, KV_HEADS, DIM)
        kv = torch.zeros(2, 20, KV_HEADS, BLOCK, DIM)
        cos_sin, q_norm, k_norm = torch.randn(4, DIM), torch.randn(DIM), torch.randn(DIM)
        out = ops.rotary_and_cache(q, k, v, kv, step, HeadPrep(cos_sin, q_norm, k_norm, eps=1e-3))
        torch.testing.assert_close(out, reference.rotate(ops.rms_norm(q, q_norm, 1e-3), cos_sin))
        keys, values = kv.transpose(2, 3).flatten(1, 2)[:, step.slot_mapping]
        torch.testing.assert_close(keys, reference.rotate(ops.rms_norm(k, k_norm, 1e-3), cos_sin))
        assert torch.equal(values, v)

    def test_rotation_is_complex_multiplication(self) -> None:
        x, angles = torch.randn(5, HEADS, DIM), torch.randn(5, 3)  # 3 pairs turn, 2 dimensions stay
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
        pairs = torch.complex(x[..., :3], x[..., 3:6]) * torch.polar(torch.ones(5, 1, 3), angles.unsqueeze(1))
        expected = torch.cat([pairs.real, pairs.imag, x[..., 6:]], dim=-1)
        torch.testing.assert_close(reference.rotate(x, cos_sin), expected)


class TestNorms:
    def test_rms_norm(self) -> None:
        x, weight = torch.randn(3, DIM), torch.randn(DIM)
        expected = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
        torch.testing.assert_close(ops.rms_norm(x, weight, 0.1), expected)

    def test_half_precision_is_rounded_once(self) -> None:
        """The digits of a float32 weight must count, too."""
        x, weight = torch.randn(64, 128).bfloat16(), 1 + 0.001 * torch.randn(128)
        exact = ops.rms_norm(x.double().float(), weight, 1e-6)
        assert torch.equal(ops.rms_norm(x, weight, 1e-6), exact.bfloat16())
        assert not torch.equal(ops.rms_norm(x, weight, 1e-6), ops.rms_norm(x, weight.bfloat16(), 1e-6))

    def test_add_rms_norm(self) -> None:
        x, residual, weight = torch.randn(3, DIM), torch.randn(3, DIM), torch.randn(DIM)
        normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(total, residual + x)
        assert torch.equal(normed, ops.rms_norm(residual + x, weight, 1e-6))

    def test_add_layer_norm(self) -> None:
        x, residual, weight, bias = torch.randn(4, 3, DIM).unbind(0)
        normed, total = ops.add_layer_norm(x, residual, weight[0], bias[0], 1e-5)
        assert torch.equal(total, residual + x)
        assert torch.equal(normed, ops.layer_norm(residual + x, weight[0], bias[0], 1e-5))

    def test_layer_norm(self) -> None:
        x, weight, bias = torch.randn(3, DIM), torch.randn(DIM), torch.randn(DIM)
        spread = (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        expected = (x - x.mean(-1, keepdim=True)) / spread * weight + bias
        torch.testing.assert_close(ops.layer_norm(x, weight, bias, 1e-5), expected)


class TestActivations:
    def test_formulas(self) -> None:
        x = torch.linspace(-4, 4, 50)
        inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
        torch.testing.assert_close(ops.activation(x, "silu"), x / (1 + torch.exp(-x)))
        torch.testing.assert_close(ops.activation(x, "gelu"), x / 2 * (1 + torch.erf(x / 2**0.5)))
        torch.testing.assert_close(ops.activation(x, "gelu_tanh"), x / 2 * (1 + torch.tanh(inner)))
        torch.testing.assert_close(ops.activation(x, "relu"), x * (x > 0))

    def test_gate_comes_first(self) -> None:
        gate_up = torch.randn(3, 2 * DIM)
        gate, up = gate_up[:, :DIM], gate_up[:, DIM:]
        assert torch.equal(ops.gated(gate_up, "gelu_tanh"), ops.activation(gate, "gelu_tanh") * up)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_they_may_be_part_of_a_product(self, dtype: torch.dtype) -> None:
        x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((3, DIM), (2 * DIM, DIM), (2 * DIM,)))
        product = ops.linear(x, ops.pack(weight), bias)
        assert torch.equal(
            ops.linear(x, ops.pack(weight), bias, kind="gelu"), ops.activation(product, "gelu")
        )
        assert torch.equal(ops.linear(x, ops.pack(weight), bias, wide=True), product.float())
        gated = ops.gated_linear(x, ops.pack(weight, gated=True), bias, "silu")
        assert torch.equal(gated, ops.gated(product, "silu"))

    def test_unknown_kind_is_named(self) -> None:
        with pytest.raises(ValueError, match="no activation 'swoosh'; there are silu"):
            ops.activation(torch.zeros(1), "swoosh")


class TestTable:
    def test_layers_see_a_new_binding(self) -> None:
        layer = Linear(2, 2)
        layer.weight, layer.bias = torch.nn.Parameter(torch.eye(2)), None
        try:
            ops.use({"linear": lambda x, weight, bias, *, kind: x + 41})
            assert layer(torch.ones(1, 2)).tolist() == [[42, 42]]
        finally:
            ops.use({})
        assert layer(torch.ones(1, 2)).tolist() == [[1, 1]]

    def test_refuses_what_no_layer_calls(self) -> None:
        with pytest.raises(ValueError, match="no such operation: rms_nrom, use; there are activation"):
            ops.use({"rms_nrom": reference.rms_norm, "use": reference.linear})
        assert ops.rms_norm is reference.rms_norm
