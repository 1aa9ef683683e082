"""Operations on a CPU by torch alone, for processors and number types that the C kernels do not know.

In float32 a row has the same bits whatever other rows are beside it, so a text has the same vector alone and
in any batch. In half precision torch's own operations keep to that, and are used as they are. Of quantized
matrices these are the specification of `csrc/tile_quantized.c`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.ops import reference
from models.ops.expert_routing_ops import WITHOUT_GATES
from models.ops.grouped_matrix import Grouped, Matrix, stacked, widen, with_input_bits
from models.ops.lora_ops import Added, with_adapters
from models.ops.tree_sum import add_in_pairs
from models.weight_coding import UNROUNDED
from worker.kernels.cpu.quantization import HEAD, Quantized, Scheme, round_inputs

Table = Mapping[str, Callable[..., Any]]
"""Operations by name, for `models.ops.use`."""


_NUMBERS = 64
"""As many float32 as torch's loops take at a time, or a multiple."""


def linear_operations(scheme: Scheme | None = None, input_bits: int | None = None) -> Table:
    """The operations of linear layers. `scheme`: how `pack` quantizes matrices; None keeps each as it is, but
    for `input_bits`."""

    def pack(
        *parts: Matrix,
        gated: bool = False,
        wide: bool = False,
        sections: int | None = None,
        plain: bool = False,
    ) -> Tensor:
        matrix = stacked(parts)
        if scheme is not None and not plain:
            return Quantized.of(widen(matrix), HEAD if wide else scheme, sections or 1)
        matrix = with_input_bits(matrix, input_bits)
        if isinstance(matrix, Grouped):
            return Quantized.kept(matrix, sections)
        # Torch rounds each product in half precision: to add up sections, each step would widen the matrix.
        return reference.pack(matrix, sections=sections if matrix.dtype == torch.float32 else None)

    experts = experts_by(gated_linear, linear)
    return {"pack": pack, "linear": linear, "gated_linear": gated_linear, "embed": embed, "experts": experts}


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    if type(weight) is not Quantized:
        return reference.embed(ids, weight)
    return weight.widened(weight.data[ids]).to(weight.form.dtype)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    kind: str | None = None,
    wide: bool = False,
    added: Added | None = None,
) -> Tensor:
    """The operation `linear`, by oneDNN in float32."""
    out = _linear(x, weight, bias, kind=kind, wide=wide)
    if added is None:
        return out

    def finish(total: Tensor) -> Tensor:
        return activation(total, kind) if kind else total

    return with_adapters(out, x, lambda x: _linear(x, weight, wide=True), bias, finish, added)


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kind: str | None = None, wide: bool = False
) -> Tensor:
    """Multiply by oneDNN, as torch itself does in half precision: it adds up each row in the same order.

    In float32 torch calls MKL, which sums products of up to 11 rows in another order than larger ones: a
    short text would have other digits alone than in a batch. oneDNN is the faster of the two from 8 rows on,
    and twice as fast from 32 (AVX-512, AMD; a batch through MiniLM: 1.6 times). With fewer it may be behind:
    a call costs 15 us instead of 3, and one row reads weights from the cache at half the speed. To pad MKL's
    products to 16 rows instead would make a single row up to 8 times slower, and nothing faster.
    """
    if type(weight) is Quantized:
        out = _multiply(x, weight, bias)
        out = activation(out, kind) if kind else out
        return out if wide else out.to(x.dtype)
    if x.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return reference.linear(x, weight, bias, kind=kind, wide=wide)
    if weight.dim() == 3:
        out = reference.add_sections(x, weight, bias, linear)
    elif len(x) == 1:  # the one case with a kernel of its own
        return _linear(x.expand(2, -1), weight, bias, kind=kind)[:1]
    else:
        out = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return _activate(out, kind) if kind else out


def _activate(x: Tensor, kind: str) -> Tensor:
    """The activation of numbers that lie one behind the other, in whole vectors of a processor: what is left
    of these is computed by other code of torch's, so that a row would have other digits in another batch."""
    left = -x.numel() % _NUMBERS
    if not left:
        return activation(x, kind)
    return activation(F.pad(x.flatten(), (0, left)), kind)[: x.numel()].view(x.shape)


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, *, added: Added | None = None
) -> Tensor:
    def multiply(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return _multiply(x, weight, bias) if type(weight) is Quantized else linear(x, weight, bias)

    out = gated(multiply(x, bias), kind).to(x.dtype)
    if added is None:
        return out
    return with_adapters(out, x, multiply, bias, lambda total: gated(total, kind), added)


def _multiply(x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
    """The product of inputs and a quantized matrix, in float32."""
    if weight.order is not None:
        x = F.pad(x, (0, 1))[:, weight.order.long()]  # the place -1 is the zero behind the last input
    pieces = x.float().chunk(weight.sections, dim=1)
    if weight.form.kind not in UNROUNDED:
        pieces = [round_inputs(piece, weight.scheme) for piece in pieces]
    out = add_in_pairs(
        [
            torch.cat([linear(piece, part) for part in weight.parts(section)], dim=-1)
            for section, piece in enumerate(pieces)
        ]
    )
    return out if bias is None else out + bias.float()


def activation(x: Tensor, kind: str) -> Tensor:
    """The same digits wherever in memory a number lies, which torch's own loops do not give in float32.

    The ends of each thread's share take another path there. So these are made of functions without such ends,
    which costs 3 % of a gated layer. In half precision the digit is rounded away.
    """
    own = _FLOAT32.get(kind) if x.dtype == torch.float32 else None
    return reference.activation(x, kind) if own is None else own(x)


def gated(gate_up: Tensor, kind: str) -> Tensor:
    if kind == "clamped":
        return reference.gated(gate_up, kind)
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate, kind) * up


def experts_by(gated_linear: Callable[..., Tensor], linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The operation `experts`, by these two: those that were chosen, each for its own tokens."""

    def experts(
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Sequence[Tensor],
        down: Sequence[Tensor],
        kind: str,
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        places: Tensor | None = None,
        wide: bool = False,
    ) -> Tensor:
        chosen = ids.shape[1]
        held = ids.flatten() if places is None else places[ids.flatten().long()]
        order = held.argsort(stable=True)  # expert by expert, and tokens in their order
        elsewhere, *counts = (held + 1).bincount(minlength=len(gate_up) + 1).tolist()
        total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        shares = weights.flatten().to(total.dtype)
        start = elsewhere
        for number, count in enumerate(counts):
            if not count:
                continue
            choices = order[start : start + count]
            rows = choices // chosen
            bias = None if gate_up_bias is None else gate_up_bias[number]
            first = linear if kind in WITHOUT_GATES else gated_linear
            inner = first(x[rows], gate_up[number], bias, kind=kind)
            result = linear(inner, down[number], wide=True)
            if down_bias is not None:
                result = result + down_bias[number]
            total[rows] += result * shares[choices].unsqueeze(1)  # no token has an expert twice
            start += count
        return total if wide else total.to(x.dtype)

    return experts


def _silu(x: Tensor) -> Tensor:
    divisor = x.neg().exp_().add_(1)
    return torch.div(x, divisor, out=divisor)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x.contiguous())  # oneDNN's, which needs contiguous memory


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = (x * x).mul_(0.044715).add_(1).mul_(x).mul_((2 / torch.pi) ** 0.5)
    return inner.tanh_().add_(1).mul_(x).mul_(0.5)


_FLOAT32: dict[str, Callable[[Tensor], Tensor]] = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}

TABLE: Table = {**linear_operations(), "activation": activation, "gated": gated}
"""All operations of this module."""
