"""The reference of latent attention, compared with the other form of the same formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models import ops
from models.context import ForwardContext
from tests.support.paged import make_step

HEADS, NOPE, ROPE, VALUE, RANK, BLOCK = 3, 6, 4, 5, 12, 4
NEW, TOTAL = [7, 5, 1, 20], [7, 16, 11, 600]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def drawn_step(dtype: torch.dtype = torch.float32) -> tuple[ForwardContext, dict[str, Tensor]]:
    """A whole prompt, a continued one, one that decodes, and a long chunk; NaN is cached beyond each."""
    step = make_step(NEW, TOTAL, BLOCK)
    tokens = sum(NEW)
    cache = torch.full((step.block_table.numel(), BLOCK, RANK + ROPE), torch.nan)
    for table, new, total in zip(step.block_table.long(), NEW, TOTAL, strict=True):
        held = torch.arange(total - new)
        cache[table[held // BLOCK], held % BLOCK] = torch.randn(total - new, RANK + ROPE)
    frequencies = 0.1 ** torch.arange(ROPE // 2)
    given = {
        "q": torch.randn(tokens, HEADS, NOPE + ROPE),
        "latent": torch.randn(tokens, RANK + ROPE),
        "up": torch.randn(HEADS * (NOPE + VALUE), RANK),
        "cache": cache,
        "cos_sin": ops.angles(step.positions, frequencies, 1.3),
    }
    return step, {name: tensor.to(dtype) for name, tensor in given.items()}


def attended(step: ForwardContext, given: dict[str, Tensor], *, turns: bool = True) -> Tensor:
    """What the operation makes of a step. The cache that is given is written to."""
    up = ops.pack_latent(given["up"], HEADS, NOPE, RANK)
    cos_sin = given["cos_sin"].float() if turns else None
    return ops.latent_attention(given["q"], given["latent"], up, given["cache"], step, cos_sin, scale=0.3)


def turned(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate x [T, ROPE] by complex numbers."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    a, b = x.chunk(2, dim=-1)
    product = torch.complex(a, b) * torch.complex(cos, sin)
    return torch.cat([product.real, product.imag], dim=-1)


def absorbed(step: ForwardContext, given: dict[str, Tensor], *, turns: bool = True) -> Tensor:
    """The form in which queries are brought to the latents, token by token, in float64."""
    wide = {name: tensor.double() for name, tensor in given.items()}
    of_keys, of_values = wide["up"].view(HEADS, -1, RANK).split([NOPE, VALUE], dim=1)
    rows = wide["latent"].clone()
    if turns:
        rows[:, RANK:] = turned(rows[:, RANK:], wide["cos_sin"])
    out = torch.empty(len(rows), HEADS, VALUE, dtype=torch.float64)
    token = 0
    for table, new, total in zip(step.block_table.long(), NEW, TOTAL, strict=True):
        past = torch.arange(total - new)
        held = torch.cat([wide["cache"][table[past // BLOCK], past % BLOCK], rows[token : token + new]])
        for seen in range(total - new + 1, total + 1):
            q = wide["q"][token]
            rotary = turned(q[:, NOPE:], wide["cos_sin"][token]) if turns else q[:, NOPE:]
            query = torch.cat([torch.einsum("hn,hnr->hr", q[:, :NOPE], of_keys), rotary], dim=-1)
            weights = (query @ held[:seen].T * 0.3).softmax(-1)
            out[token] = torch.einsum("hr,hvr->hv", weights @ held[:seen, :RANK], of_values)
            token += 1
    return out


class TestLatentAttention:
    @pytest.mark.parametrize("turns", [True, False])
    def test_equals_the_absorbed_form(self, turns: bool) -> None:
        step, given = drawn_step()
        expected = absorbed(step, given, turns=turns)
        out = attended(step, given, turns=turns)
        torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)

    def test_writes_rows_with_the_key_rotated_and_no_others(self) -> None:
        step, given = drawn_step()
        before = given["cache"].clone()
        attended(step, given)
        expected = given["latent"].clone()
        expected[:, RANK:] = turned(expected[:, RANK:], given["cos_sin"])
        rows = given["cache"].flatten(0, 1)
        torch.testing.assert_close(rows[step.slot_mapping], expected)
        rows[step.slot_mapping] = before.flatten(0, 1)[step.slot_mapping]
        torch.testing.assert_close(given["cache"], before, equal_nan=True)

    def test_sums_in_float32_whatever_the_type(self) -> None:
        step, given = drawn_step(torch.bfloat16)
        wide = {name: tensor.float() for name, tensor in given.items()}
        out = attended(step, given, turns=False)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, attended(step, wide, turns=False).bfloat16())

    def test_a_matrix_of_another_shape_is_refused(self) -> None:
        for shape in [(HEADS * NOPE, RANK), (HEADS * (NOPE + VALUE) + 1, RANK), (HEADS * 11, RANK + 1)]:
            with pytest.raises(ValueError, match="does not make keys of 6 and values for 3 heads"):
                ops.pack_latent(torch.randn(shape), HEADS, NOPE, RANK)
