"""Every operation a layer may call, in plain torch: the default, and the specification of each faster kernel.

The functions run on any device and in any float dtype. Arithmetic that loses digits in half precision (norms,
rotary angles, soft-caps) is done in float32 and rounded once, at the end. Shapes: T tokens of a step, H query
heads, G key/value heads, D dimensions per head, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from models.context import ForwardContext
from models.ops.attention_inputs import (
    AS_PROJECTED,
    CODES,
    UNSCALED,
    CacheScales,
    HeadPrep,
    rounded_queries,
    widened,
    write_cache,
)
from models.ops.encoder_ops import by_distance, distance_between
from models.ops.grouped_matrix import Matrix, widen
from models.ops.lora_ops import Added, with_adapters
from models.ops.tree_sum import add_in_pairs

# Loading


def split_words(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """int32 [R, C] -> uint8 [R, C * each]: the codes of 4 or 8 bits in each word.

    They come in the order in which they lie in a word, the lowest bits first; or `order` names their places.
    """
    laid = words.clone(memory_format=torch.contiguous_format)
    codes = laid.view(torch.uint8).unflatten(-1, (-1, 4))  # on little-endian machines
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return (codes if order is None else codes[..., list(order)]).flatten(1)


# The beginning of a model


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """Look up ids [T] int64 in weight [vocabulary, width] -> [T, width]."""
    return F.embedding(ids, weight)


def angles(positions: Tensor, frequencies: Tensor, scale: float, axes: Tensor | None = None) -> Tensor:
    """The angles for `rotate`: [T] int64, [pairs] -> [T, 2 * pairs] float32, the cosines, then the sines.

    Tokens may have a position on each of A axes, [A, T]; `axes` [pairs] int64 says which one turns a pair.
    """
    turning = positions.unsqueeze(-1) if axes is None else positions[axes].t()
    turned = turning.float() * frequencies  # [T, pairs]
    return torch.cat([turned.cos(), turned.sin()], dim=-1) * scale


def add(x: Tensor, y: Tensor) -> Tensor:
    """Add x [T, F] and y [T, F], or y [F] to every row."""
    return x + y


def scale(x: Tensor, factor: float) -> Tensor:
    """x [T, F] times a number."""
    return x * factor


def scale_by_position(x: Tensor, positions: Tensor, rate: float, length: int) -> Tensor:
    """x [T, F] times a number that grows with the lengths of `length` tokens before each row's position.

    positions [T] int64. The number is 1 within the first length, and 1 + rate * ln(n) within the n-th.
    """
    factors = 1 + rate * torch.log(1 + torch.floor(positions.float() / length))
    return (x.float() * factors.unsqueeze(-1)).to(x.dtype)


# Linear layers


def pack(
    *parts: Matrix,
    gated: bool = False,
    wide: bool = False,
    sections: int | None = None,
    plain: bool = False,
) -> Tensor:
    """Bring a matrix [out, in] into the layout that `linear` reads, once for each matrix, after loading.

    `parts` are pieces of its rows, one above the other, which a kernel may take without joining them first.
    `gated` says that only `gated_linear` reads it, `wide` that only `linear` with `wide` does, `plain` that
    no digit may be lost. If the inputs can be cut over ranks, `sections` counts the equal pieces of them
    that are added up apart. What is quantized is widened here; a kernel may keep it as it is.
    """
    pieces = [widen(part) for part in parts]
    matrix = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if sections is None:
        return matrix.contiguous()
    return torch.stack(matrix.chunk(sections, dim=1))  # [sections, out, in / sections]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    kind: str | None = None,
    wide: bool = False,
    added: Added | None = None,
) -> Tensor:
    """Multiply x [T, in] by `weight`, as `pack` returned it -> [T, out].

    `kind` names an activation that follows. With `wide` the result is float32, whatever x is. `added`: what
    `lora` has computed of this layer. If the inputs are divided into sections, each is added up in float32,
    then neighbouring sections, then their sums: so a rank that holds half of them computes one of the two
    numbers that are added last.
    """

    def multiply(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias) if weight.dim() == 2 else add_sections(x, weight, bias)

    def finish(out: Tensor) -> Tensor:
        return activation(out, kind) if kind else out

    out = finish(multiply(x, bias))
    out = out.float() if wide else out.to(x.dtype)
    return out if added is None else with_adapters(out, x, multiply, bias, finish, added)


def add_sections(
    x: Tensor, weight: Tensor, bias: Tensor | None, multiply: Callable[..., Tensor] = F.linear
) -> Tensor:
    """Multiply x [T, in] by `weight` [sections, out, in / sections] -> [T, out], float32 or wider.

    `multiply` makes the product of one section.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    pieces = x.to(dtype).chunk(len(weight), dim=1)
    total = add_in_pairs(
        [multiply(piece, matrix) for piece, matrix in zip(pieces, weight.to(dtype), strict=True)]
    )
    return total if bias is None else total + bias


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, *, added: Added | None = None
) -> Tensor:
    """Multiply [T, in] by a matrix to [T, 2F], gate and up side by side, -> activation(gate) * up [T, F]."""
    out = gated(F.linear(x, weight, bias), kind)
    if added is None:
        return out
    return with_adapters(out, x, lambda x: F.linear(x, weight), bias, lambda total: gated(total, kind), added)


# Norms and activations


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise over the last dimension. The weight may be float32 beside a half precision x."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add and normalise: -> (norm of the sum, the sum)."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def sum_squares(x: Tensor, sections: int) -> Tensor:
    """Add up the squares of each row [T, F] in float32, in so many sections, and these in pairs -> [T, 1]."""
    squares = x.float().square().unflatten(-1, (sections, -1))
    return add_in_pairs(squares.sum(-1, keepdim=True).unbind(1))


def spread_rms_norm(x: Tensor, weight: Tensor, squares: Tensor, count: int, eps: float) -> Tensor:
    """Normalise rows [T, F] of which others hold the rest: `squares` [T, 1] sums those of `count` numbers."""
    wide = x.float() * (1 / torch.sqrt(squares / count + eps))
    return (wide * weight.float()).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Add and normalise: -> (norm of the sum, the sum)."""
    total = residual + x
    return layer_norm(total, weight, bias, eps), total


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def activation(x: Tensor, kind: str) -> Tensor:
    if kind not in _ACTIVATIONS:
        raise ValueError(f"no activation {kind!r}; there are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[kind](x)


def xielu(x: Tensor, curves: Tensor) -> Tensor:
    """Half of x [T, F], and a square above 0 and an exponential below; curves [2] float32: their factors."""
    wide, (square, exponential) = x.float(), curves
    below = wide.clamp(max=0)
    return (wide / 2 + square * F.relu(wide).square() + exponential * (below.expm1() - below)).to(x.dtype)


def gated(gate_up: Tensor, kind: str) -> Tensor:
    """Gate: [T, 2F], gate and up side by side, -> activation(gate) * up [T, F].

    The kind "clamped" is gpt-oss': gates up to 7, values from -7 to 7 to which 1 is added.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if kind != "clamped":
        return activation(gate, kind) * up
    gate, up = gate.float().clamp(max=7), up.float().clamp(-7, 7)
    return ((up + 1) * (gate * (gate * 1.702).sigmoid())).to(gate_up.dtype)


# Attention


def rotary_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    context: ForwardContext,
    prep: HeadPrep = AS_PROJECTED,
    scales: CacheScales = UNSCALED,
) -> Tensor:
    """Do all that lies between the projections and attention: prepare q and k, and cache k and v.

    q [T, H, D]; k, v [T, G, D]; kv and scales as in `attention`. -> q, prepared for `attention`.
    """
    k = rotate(k, prep.cos_sin, prep.k_norm, prep.eps)
    write_cache(k, rotate(v, None, prep.v_norm, prep.eps), kv, context, scales)
    return rotate(q, prep.cos_sin, prep.q_norm, prep.eps)


def rotate(x: Tensor, cos_sin: Tensor | None, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Rotate the first R dimensions of every head [T, heads, D]; the others pass, and all do without angles.

    cos_sin [T, R] float32: R/2 cosines, then R/2 sines; pair i is the dimensions i and i + R/2. `norm` [D]:
    the weights of an RMS norm over each head, which comes first.
    """
    x = x if norm is None else rms_norm(x, norm, eps)
    if cos_sin is None:
        return x
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R/2] each
    turned, passed = x.split([cos_sin.shape[-1], x.shape[-1] - cos_sin.shape[-1]], dim=-1)
    a, b = turned.float().chunk(2, dim=-1)
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, passed], dim=-1) if passed.shape[-1] else turned


def attention(
    q: Tensor,
    kv: Tensor,
    context: ForwardContext,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
    last: Tensor | None = None,
    scales: CacheScales = UNSCALED,
) -> Tensor:
    """Causal attention of packed rows over the paged cache: q [T, H, D] -> [T, H, D].

    kv [2, blocks, G, block_size, D] already holds the keys and values of this step, in the type of q, or in 8
    bits and divided by `scales`; or rows of codes with scales of their own, as `rounded` makes them: queries
    are rounded too then, and sums are float32. The new tokens of a sequence are its last ones; with a window,
    a token sees that many positions, its own included. Nothing beyond a sequence's end is used: what lies
    there may be anything, NaN too. sinks [H] are the scores of one more key of a head, whose value is zero.
    slopes [H] float32 are subtracted from the scores of each head once for each position between query and
    key. bias [H, 2R + 1] float32 is added to the scores by distance, as by `encoder_attention`. last [T]
    int32: the positions up to which tokens see, if not to their own; in a row they never fall.
    """
    out = torch.empty_like(q)
    q = rounded_queries(q) if kv.dtype == CODES else q
    start = 0
    for row, (new, total) in enumerate(zip(context.query_lens_host, context.kv_lens_host, strict=True)):
        # The first position that the first of the new tokens still sees: nothing before it is gathered.
        first = 0 if window is None else max(0, total - new - window + 1)
        first = max(first, min(context.first, total - new))
        gathered = gather_cached(kv, context.block_table[row], first, total)
        keys, values = map(widened, gathered, 2 * [q.dtype], (scales.keys, scales.values))  # [G, K, D] each
        queries = q[start : start + new].transpose(0, 1)  # [H, new, D]
        ends = None if last is None else last[start : start + new] - first
        skipped = max(0, context.first - first)  # of the gathered positions, which only they see themselves
        changed = softcap is not None or slopes is not None or bias is not None
        if not changed and sinks is None and not skipped:
            heads = _attend(queries, keys, values, ends, scale=scale, window=window)  # [H, new, D]
        else:
            mask = _mask(new, keys.shape[1], window, ends, q.device, skipped)
            heads = _attend_plainly(queries, keys, values, mask, scale, softcap, sinks, slopes, bias)
        out[start : start + new] = heads.transpose(0, 1)
        start += new
    return out


def gather_cached(kv: Tensor, blocks: Tensor, first: int, total: int) -> tuple[Tensor, Tensor]:
    """Gather the keys and values of positions [first, total) of one sequence."""
    size = kv.shape[3]
    skipped = first // size
    mine = kv.index_select(1, blocks[skipped : -(-total // size)])  # [2, n, G, size, D]
    rows = mine.transpose(1, 2).flatten(2, 3)  # [2, G, n * size, D]
    keys, values = rows[:, :, first - skipped * size : total - skipped * size].unbind(0)
    return keys, values


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, last: Tensor | None, *, scale: float, window: int | None
) -> Tensor:
    new, total = q.shape[1], keys.shape[1]
    causal = new == total and (window is None or window >= total) and last is None  # no mask needs to be made
    mask = None if causal or new == 1 else _mask(new, total, window, last, q.device)  # one query sees all
    return F.scaled_dot_product_attention(
        q[None], keys[None], values[None], attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )[0]


def _attend_plainly(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Attention with what SDPA cannot do: scores that are capped or fall with distance, and sinks."""
    groups = keys.shape[0]
    grouped = q.float().unflatten(0, (groups, -1))  # [G, H/G, new, D]: neighbours share a key head
    scores = grouped @ keys.float().transpose(-1, -2).unsqueeze(1) * scale  # [G, H/G, new, K]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    new, total = mask.shape
    distance = distance_between(range(total - new, total), range(total), q.device)
    if slopes is not None:
        scores = scores + slopes.view(groups, -1, 1, 1) * distance
    if bias is not None:
        scores = scores + by_distance(distance, bias).view_as(scores)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[1]]
    return (weights @ values.float().unsqueeze(1)).flatten(0, 1).to(q.dtype)  # [H, new, D]


def _mask(
    new: int, total: int, window: int | None, last: Tensor | None, device: torch.device, skipped: int = 0
) -> Tensor:
    """The keys [new, total] that query i, at total - new + i, sees: up to its own, or `last` [new].

    The first `skipped` are seen by themselves alone.
    """
    keys = torch.arange(total, device=device)
    own = keys[total - new :, None]
    seen = keys <= (own if last is None else last.unsqueeze(1))
    seen = seen & ((keys >= skipped) | (keys == own)) if skipped else seen
    return seen if window is None else seen & (keys > own - window)
