"""The C kernels access no memory past their tensors: here each ends where a protected page begins.

One that reads or writes a byte too many does not fail its test, but ends the process.
"""

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_levels import BY_TURNS, linear_table, table_of, use_threads
from paged import make_cache, make_step
from torch import Tensor

from models.context import ForwardContext
from models.ops.attention_inputs import HeadPrep
from worker.kernels.cpu.operations import Table
from worker.kernels.cpu.quantization import SCHEMES

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="memory is guarded as on Linux")

DTYPES = [torch.float32, torch.bfloat16]
_PAGE = mmap.PAGESIZE
_PROT_NONE = 0


def at_the_end(values: Tensor) -> Tensor:
    """A copy whose last byte is the last one before a protected page."""
    pages = -(-values.nbytes // _PAGE)
    memory = mmap.mmap(-1, (pages + 1) * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if protect(whole.data_ptr() + pages * _PAGE, _PAGE, _PROT_NONE):
        raise OSError(ctypes.get_errno(), "a page could not be guarded")
    end = pages * _PAGE
    return whole[end - values.nbytes : end].view(values.dtype).view(values.shape).copy_(values)


@pytest.fixture(params=BY_TURNS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A level whose results lie at the end of memory, too."""
    torch.manual_seed(0)
    use_threads(request.param, 2)
    zeros = torch.zeros

    def empty(*size: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return at_the_end(zeros(*size, dtype=dtype))

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_like", lambda x: empty(x.shape, dtype=x.dtype))
    monkeypatch.setattr(Tensor, "new_empty", lambda x, *size: empty(*size, dtype=x.dtype))
    yield request.param
    use_threads(request.param, 1)


@pytest.fixture
def table(level: str) -> Table:
    return table_of(level)


ROWS = [([1], [700]), ([1, 2, 33, 1], [20, 2, 90, 300])]
"""New tokens and all tokens of the rows of a step."""


def guarded_step(new: list[int], total: list[int]) -> ForwardContext:
    step = make_step(new, total, block_size=7)
    for name in ("query_starts", "kv_lens", "block_table", "slot_mapping"):
        setattr(step, name, at_the_end(getattr(step, name)))
    return step


def values(*size: int, dtype: torch.dtype) -> Tensor:
    return at_the_end(torch.randn(size).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_linear_layers(level: str, dtype: torch.dtype, scheme: str | None) -> None:
    table = linear_table(level, scheme)
    for outputs, inputs in ((2, 1), (34, 5), (64, 33), (102, 67), (70, 128)):
        weight, bias = values(outputs, inputs, dtype=dtype), values(outputs, dtype=dtype)
        plain, gated = (table["pack"](weight, gated=gated) for gated in (False, True))
        for packed in (plain, gated):
            packed.data = at_the_end(packed.data)
            packed.described.panels = packed.data_ptr()
        for rows in (1, 3, 13, 33):
            x = values(rows, inputs, dtype=dtype)
            assert table["linear"](x, plain, bias).isfinite().all()
            assert table["gated_linear"](x, gated, bias, "silu").isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_activations(table: Table, dtype: torch.dtype) -> None:
    for width in (1, 7, 16, 31, 67):
        x, residual = values(3, width, dtype=dtype), values(3, width, dtype=dtype)
        weight, bias = values(width, dtype=dtype), values(width, dtype=dtype)
        assert table["add_rms_norm"](x, residual, weight, 1e-5)[0].isfinite().all()
        assert table["add_layer_norm"](x, residual, weight, bias, 1e-5)[0].isfinite().all()
        assert table["activation"](x, "gelu").isfinite().all()
        assert table["add"](x, weight).isfinite().all()
        assert table["scale"](x, 3.0).isfinite().all()
        assert table["gated"](values(3, 2 * width, dtype=dtype), "silu").isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 1, 8), (3, 3, 64), (8, 1, 40), (64, 1, 24), (2, 1, 248)])
@pytest.mark.parametrize("rows", ROWS)
def test_attention(
    table: Table, dtype: torch.dtype, shape: tuple[int, int, int], rows: tuple[list[int], list[int]]
) -> None:
    """Shapes: query heads for each key head, key heads, dimensions."""
    (group, kv_heads, dim), step, tokens = shape, guarded_step(*rows), sum(rows[0])
    q = values(tokens, group * kv_heads, dim, dtype=dtype)
    k, v = (values(tokens, kv_heads, dim, dtype=dtype) for _ in range(2))
    cache, turned = at_the_end(make_cache(step, kv_heads, dim, dtype)), values(tokens, 6, dtype=torch.float32)
    prep = HeadPrep(turned, values(dim, dtype=dtype), values(dim, dtype=dtype), eps=1e-5)
    outs = [
        table["rotary_and_cache"](q, k, v, cache, step, prep),
        table["rotate"](q, turned),
        table["attention"](q, cache, step, scale=0.1),
        table["attention"](q, cache, step, scale=0.1, window=5, softcap=30.0),
        table["encoder_attention"](q, k, v, step, scale=0.1),
        table["encoder_attention"](k, k, v, step, scale=0.1, window=5),
    ]
    assert all(out.isfinite().all() for out in outs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 16, 2, 3, 7), (70, 80, 10, 8, 40), (16, 112, 64, 33, 16)])
@pytest.mark.parametrize("rows", ROWS)
def test_latent_attention(
    table: Table, dtype: torch.dtype, shape: tuple[int, ...], rows: tuple[list[int], list[int]]
) -> None:
    """Shapes: heads, the rank, and the numbers of a head that are rotated, not rotated, and of its value."""
    (heads, rank, rope, nope, value), step, tokens = shape, guarded_step(*rows), sum(rows[0])
    up = table["pack_latent"](values(heads * (nope + value), rank, dtype=dtype), heads, nope, rank)
    for matrix in (up.of_keys, up.of_values):
        matrix.data = at_the_end(matrix.data)
        matrix.described.panels = matrix.data_ptr()
    q, latent = values(tokens, heads, nope + rope, dtype=dtype), values(tokens, rank + rope, dtype=dtype)
    cache = values(step.block_table.numel(), 7, rank + rope, dtype=dtype)
    turned = values(tokens, rope, dtype=torch.float32)
    most, width = 13, rope + nope + (rope + nope) % 2
    keys = values(step.block_table.numel(), 7, width, dtype=dtype)
    queries, own = values(tokens, 3, width, dtype=dtype), values(tokens, width, dtype=dtype)
    weights = values(tokens, 3, dtype=torch.float32)
    chosen = table["choose_tokens"](queries, own, weights, keys, step, turned, most=most)
    for some in (None, chosen):
        out = table["latent_attention"](q, latent, up, cache, step, turned, scale=0.1, chosen=some)
        assert out.isfinite().all()
