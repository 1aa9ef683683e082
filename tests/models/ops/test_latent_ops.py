"""The reference of latent attention, compared with the other form of the same formula in float64."""

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


class TestChooseTokens:
    def drawn(self) -> tuple[ForwardContext, dict[str, Tensor]]:
        """Queries and weights of three heads of 6, keys of all tokens, and NaN where nothing is cached."""
        step = make_step(NEW, TOTAL, BLOCK)
        cache = torch.full((step.block_table.numel(), BLOCK, 6), torch.nan)
        for table, new, total in zip(step.block_table.long(), NEW, TOTAL, strict=True):
            held = torch.arange(total - new)
            cache[table[held // BLOCK], held % BLOCK] = torch.randn(total - new, 6)
        tokens = sum(NEW)
        given = {
            "q": torch.randn(tokens, 3, 6),
            "key": torch.randn(tokens, 6),
            "weights": torch.randn(tokens, 3),
        }
        return step, {**given, "cache": cache, "cos_sin": torch.randn(tokens, ROPE)}

    def test_chooses_the_highest_sums_of_what_is_above_zero(self) -> None:
        step, given = self.drawn()
        chosen = ops.choose_tokens(**given, context=step, most=9)
        rows, token = given["cache"].flatten(0, 1), 0
        turn = given["cos_sin"][:, None]
        q = torch.cat([turned(given["q"][..., :ROPE], turn), given["q"][..., ROPE:]], dim=-1)
        for table, new, total in zip(step.block_table.long(), NEW, TOTAL, strict=True):
            slots = (table[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
            for seen in range(total - new + 1, total + 1):
                scores = given["weights"][token] @ (q[token] @ rows[slots[:seen]].T).relu()
                best = sorted(scores.sort(descending=True, stable=True).indices[:9].tolist())
                assert chosen[token].tolist() == best + [-1] * (9 - len(best))
                token += 1

    def test_of_equal_scores_the_earlier_are_chosen(self) -> None:
        step, given = self.drawn()
        given["q"] = torch.zeros_like(given["q"])
        chosen = ops.choose_tokens(**given, context=step, most=9)
        assert chosen[-1].tolist() == list(range(9))


def test_attention_reads_what_was_chosen_and_nothing_else() -> None:
    """The same as attention of a token to a sequence of those alone; pieces may have none of them."""
    step, given = drawn_step()
    chosen = torch.full((sum(NEW), 3), -1, dtype=torch.int32)
    chosen[:, 0] = 0
    chosen[-20:] = torch.tensor([2, 570, 575])
    up = ops.pack_latent(given["up"], HEADS, NOPE, RANK)
    given = {**given, "up": up, "context": step, "scale": 0.3}
    out = ops.latent_attention(**given, chosen=chosen)
    held = given["cache"][step.block_table[3].long()].flatten(0, 1)[[2, 570, 575]]
    alone = make_step([1], [3], BLOCK)
    cache = torch.zeros(1, BLOCK, RANK + ROPE)
    cache[0, :3] = held
    own = {"q": given["q"][-1:], "latent": held[2:], "cache": cache, "context": alone}
    unturned = torch.cat([torch.ones(1, ROPE // 2), torch.zeros(1, ROPE // 2)], dim=1)
    q = torch.cat([own["q"][..., :NOPE], turned(own["q"][..., NOPE:], given["cos_sin"][-1:, None])], dim=-1)
    expected = ops.latent_attention(**{**given, **own, "q": q, "cos_sin": unturned})
    torch.testing.assert_close(out[-1:], expected)


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
