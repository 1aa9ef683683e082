"""Steps of each kind on tensors without memory: what they would start are the kernels of a model."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from models import ops
from models.context import AdapterRows, ForwardContext, StateRows, use_context
from models.families.decoders.decoder import lm_head
from models.layers.attention import Attention
from models.layers.experts import Experts
from models.layers.state import StateLayer
from models.loader import LoadOptions
from models.model import ServedModel, stream_size
from models.ops.pooling_ops import Segments
from models.parallel.parallel import Parallel
from models.state_rows import STATE_COLUMNS
from models.towers.model import find_tower
from models.towers.tower import sees_media
from worker.kernels.cuda.attention_plan import Heads, Kind, Launch
from worker.kernels.cuda.capabilities import COUNTERS, Tiles
from worker.kernels.cuda.draw_kernel import draw, filters
from worker.kernels.cuda.fused.largest import find_largest
from worker.kernels.cuda.launch import joining
from worker.kernels.cuda.steps import layout_kernels as layouts
from worker.kernels.cuda.steps.recorded_forms import SlotProgress
from worker.sampling.grouped_logits import BY_TORCH, GROUP, GroupedLogits
from worker.tables.slots import Slots
from worker.tables.staging import columns_of

NOWHERE = torch.device("meta")
ALIGNED = 16
"""Triton compiles variants of their own for pointers and numbers that this does not divide."""
PROCESSORS = 132
_STEPS = (
    ([1], [64]),
    ([1], [8192]),  # so many keys are split
    ([1, 40], [20, 40]),  # more rows than the narrowest tile of a product has, and fewer than are widened for
    ([1, 1500], [20, 1500]),
)
"""New tokens and all tokens of each row, for steps that need every variant of attention."""
_JOINED_STEPS = (([1], [8192]), ([1, 1], [8192, 20]))
"""Steps by kernels that do several operations: those of one row are variants of their own."""
_STEPS_OF_EXPERTS = tuple(([1, new], [20, new]) for new in (7, 299, 8000))
"""More steps where there are experts, which have rows for each size of tiles then, however many they are."""
_SAMPLED = (1, 40, 256)
"""Rows of logits, for every variant of a product with a quantized LM head."""


def take_steps(model: ServedModel, given: LoadOptions, block_size: int, cache_dtype: torch.dtype) -> None:
    """Take steps of each kind with a model that was made as `given`, and do what follows its layers."""
    config, parallel = given.config, given.parallel
    width = stream_size(model, config.hidden_size)
    is_mixture = any(isinstance(layer, Experts) for layer in model.modules())
    steps = (*_STEPS, *_STEPS_OF_EXPERTS) if is_mixture else _STEPS
    for layer in model.attention_layers():
        layer.kv = _nowhere(layer.cache_shape(8, block_size), cache_dtype)
    for layer in model.modules():
        if isinstance(layer, StateLayer):
            layer.states = [_no_states(shape) for shape in layer.state_shapes()]
    tower = find_tower(model)
    most = max(sum(new) for new, _ in steps)
    tables = [None, _nowhere((most,), torch.int32)] if sees_media(tower) else [None]
    for new, total in steps:
        step = _step(new, total if model.causal else new, block_size, parallel)
        for last in tables:
            step.last = last if last is None else last[: sum(new)]
            _take(model, step, width, given)
    for new, total in _JOINED_STEPS if model.causal else ():
        step = _step(new, total, block_size, parallel)
        step.adapters = None
        with joining(_nowhere((COUNTERS,), torch.int32)):
            _take(model, step, width, given)
    _lay_out_tokens(block_size, paged=model.causal)
    if given.conversion is not None and given.conversion.runner == "generate" and parallel.last:
        head = lm_head(model.modules())
        for rows in _SAMPLED:
            hidden = _nowhere((rows, config.output_size), given.dtype)
            model.logits(hidden)
            if head is not None and head.adapters is not None:
                head.adapted = _adapters(rows)
                model.logits(hidden)
                head.adapted = None
        windows = {layer.window for layer in model.attention_layers() if isinstance(layer, Attention)}
        _choose_tokens(config.vocab_size, block_size, groups=min(2, len(windows)) or 1)
    if parallel.last:
        _pool(config.output_size, given.dtype)


def _take(model: ServedModel, step: ForwardContext, width: int, given: LoadOptions) -> None:
    tokens = len(step.positions)
    stream = None if given.parallel.first else _nowhere((tokens, width), given.dtype)
    with use_context(step):
        model.forward(_nowhere((tokens,), torch.int64), step.positions, stream)


def _step(new: list[int], total: list[int], block_size: int, parallel: Parallel) -> ForwardContext:
    """A step of so many new tokens of each row, in each of the replicas."""
    rows, tokens = len(new), sum(new)
    blocks = -(-max(total) // block_size)
    return ForwardContext(
        positions=_nowhere((tokens,), torch.int64),
        query_starts=_nowhere((rows + 1,), torch.int32),
        kv_lens=_nowhere((rows,), torch.int32),
        block_table=_nowhere((rows, blocks), torch.int32),
        slot_mapping=_nowhere((tokens,), torch.int64),
        states=StateRows(_nowhere((STATE_COLUMNS, rows), torch.int32), []),
        block_size=block_size,
        query_lens_host=new,
        kv_lens_host=total,
        adapters=_adapters(tokens),
        replica_tokens=[tokens] * (1 if parallel.replicas is None else parallel.replicas.size),
    )


def _adapters(tokens: int) -> AdapterRows:
    return AdapterRows(_nowhere((tokens,), torch.int32), _nowhere((1,), torch.int32), [])


def _no_states(shape: tuple[int, ...]) -> Tensor:
    """Two places of states without memory, which begin at multiples of so many numbers as a worker's do."""
    size = prod(shape)
    return _nowhere((2, -(-size // ALIGNED) * ALIGNED), torch.float32)[:, :size].unflatten(1, shape)


def _lay_out_tokens(block_size: int, *, paged: bool) -> None:
    """Lay out a step of any rows, as a graph does."""
    slots = Slots(NOWHERE, 4, 8 * block_size, block_size, paged=paged)
    held, starts, ends, rows = columns_of(_nowhere((64,), torch.int32), (4, 5, 4, 16))
    steps = layouts.StepTensors.make(NOWHERE, 16, 4, slots.most_blocks)
    layouts.lay_out_any_rows(held, starts, ends, rows, slots, steps)


def _choose_tokens(vocab_size: int, block_size: int, groups: int) -> None:
    """Lay out a step of single tokens and the samples of any other, as graphs do, and draw tokens.

    Of any number of groups of layers, the last one is laid out by another variant than those before it.
    """
    slots = Slots(NOWHERE, 4, 8 * block_size, block_size, shares=[1] * groups)
    lens = _nowhere((4,), torch.int32)
    steps = layouts.StepTensors.make(NOWHERE, 4, 4, slots.most_blocks, groups)
    states = SlotProgress(slots).table
    layouts.lay_out_single_tokens(_nowhere((64,), torch.int32), states, slots, steps, lens)
    blocks = Launch(lens, lens, Tiles(16, 64, 4, 3), Kind.SHORT)
    layouts.lay_out_splits(lens, {(Heads(1, 1, 64), torch.bfloat16, True): [blocks]}, PROCESSORS)
    layouts.lay_out_sampling(
        _nowhere((4,), torch.int32), states, slots, layouts.SampleTensors.make(NOWHERE, 4)
    )
    draw(no_logits(4, vocab_size), filters(NOWHERE))
    find_tops_of(4, -(-vocab_size // GROUP))


def find_tops_of(rows: int, groups: int) -> None:
    """Look for the likeliest tokens as joined steps do."""
    with joining(_nowhere((COUNTERS,), torch.int32)):
        find_largest(_nowhere((rows, groups * GROUP), torch.float32))


def no_logits(rows: int, vocab_size: int) -> GroupedLogits:
    """Logits without memory, whose likeliest tokens nobody looks for."""
    groups = -(-vocab_size // GROUP)
    found = _nowhere((2, rows), torch.int32), _nowhere((rows, groups), torch.float32)
    logits = _nowhere((rows, groups * GROUP), torch.float32)
    return GroupedLogits(logits, replace(BY_TORCH, find_largest=lambda logits: found))


def _pool(width: int, dtype: torch.dtype) -> None:
    """Merge the rows of a text, as they are and as a projection of every token leaves them."""
    segments = Segments([(0, 0, 64)], _nowhere((1, 3), torch.int32))
    for kind in dict.fromkeys((dtype, torch.float32)):
        ops.pool(_nowhere((64, width), kind), segments, "MEAN", lambda rows, skip: rows)


def _nowhere(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=NOWHERE)
