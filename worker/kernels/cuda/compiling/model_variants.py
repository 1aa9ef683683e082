"""Compiles all variants of kernels that a model needs on a card, without that card or any other.

Which variants these are is not written down: the model, built from its config alone, takes steps of each kind
on tensors without memory, and the kernels that it would start are compiled with the arguments that they would
get. They lie in Triton's cache afterwards, under the names by which a server looks for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx.experimental import _config as meta_rules
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from models import ops
from models.config import ModelConfig
from models.context import ForwardContext, StateRows, use_context
from models.conversion.conversion_choice import Conversion, resolve_conversion
from models.layers.attention import Attention
from models.layers.experts import Experts
from models.layers.state import StateLayer
from models.loader import LoadOptions, load_model
from models.model import ServedModel, stream_size
from models.ops.pooling_ops import Segments
from models.parallel.experts import ExpertPlace, Transport
from models.parallel.parallel import Parallel, Replicas
from models.state_rows import STATE_COLUMNS
from models.vision.model import find_tower
from worker.host.machine import usable_cores
from worker.kernels.cuda.attention_plan import Heads, Kind, Launch
from worker.kernels.cuda.capabilities import Card, Tiles
from worker.kernels.cuda.compiling.machine_code import Compiled, inspect
from worker.kernels.cuda.compiling.shapes_only import ShapesOnly
from worker.kernels.cuda.draw_kernel import PROVED, draw, filters
from worker.kernels.cuda.launch import Call, collecting
from worker.kernels.cuda.operations import cuda_operations
from worker.kernels.cuda.proofs import cases_on
from worker.kernels.cuda.steps import layout_kernels as layouts
from worker.kernels.cuda.unsupported import Unsupported, refuse_unsupported
from worker.kernels.uses import Uses
from worker.media import sees_media
from worker.sampling.grouped_logits import BY_TORCH, GROUP, GroupedLogits
from worker.tables.recorded_forms import SlotStates
from worker.tables.slots import Slots
from worker.tables.staging import columns_of

logger = logging.getLogger(__name__)

NOWHERE = torch.device("meta")
_ALIGNED = 16
"""Triton compiles variants of their own for pointers and numbers that this does not divide."""
_PROCESSORS = 132
_MOST_THREADS = 16
_STEPS = (
    ([1], [64]),
    ([1], [8192]),  # so many keys are split
    ([1, 40], [20, 40]),  # more rows than the narrowest tile of a product has, and fewer than are widened for
    ([1, 1500], [20, 1500]),
)
"""New tokens and all tokens of each row, for steps that need every variant of attention."""
_STEPS_OF_EXPERTS = tuple(([1, new], [20, new]) for new in (7, 299, 8000))
"""More steps where there are experts, which have rows for each size of tiles then, however many they are."""
_SAMPLED = (1, 40, 256)
"""Rows of logits, for every variant of a product with a quantized LM head."""


class _OtherRanks:
    """Ranks that are not there: what this one would send them comes back in the shape of the answer.

    It is an exchange with them, too, which has ended.
    """

    exact = False

    def __init__(self, size: int) -> None:
        self._size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self._size, dim=-1)

    def exchange(self, out: Sequence[Tensor], into: Sequence[Tensor]) -> _OtherRanks:
        return self

    def wait(self) -> None:
        return None


class _NoDevice:
    """Triton's view of a card that is not there: all that it asks for in order to compile."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # the key of Triton's caches of kernels

    def get_current_stream(self, device: int) -> int:
        return 0


def model_calls(
    config: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
    capability: int,
    block_size: int = 64,
    cache_dtype: torch.dtype | None = None,
    kernels: Mapping[str, Callable[..., Any]] | None = None,
    parallel: Parallel = Parallel(),
    conversion: Conversion | None = None,
    uses: Uses | None = None,
) -> list[Call]:
    """The calls of kernels that a model makes, one for each variant; a cache has its type by default.

    `kernels`: the operations that are bound already, and stay so; None: those of any card with this
    capability. `parallel`: the rank whose pieces are computed; no other one takes part. `conversion`: what
    the model is served as; None: what a server would choose. `uses` notes what it asks of operations.
    """
    parallel = _alone(parallel)
    conversion = conversion or resolve_conversion(config, folder)
    with torch.inference_mode(), _all_are_chosen(), ShapesOnly(), collecting() as calls:
        table = cuda_operations(Card(capability, _PROCESSORS)) if kernels is None else kernels
        ops.use(table if uses is None else uses.noting(table))
        try:
            options = LoadOptions(
                config,
                folder,
                dtype=dtype,
                device=NOWHERE,
                load_format="dummy",
                parallel=parallel,
                conversion=conversion,
            )
            model = load_model(options)
            refuse_unsupported(model.modules())
            _take_steps(model, options, block_size, cache_dtype or dtype)
            if uses is not None:
                uses.is_known = find_tower(model) is None  # whose steps are not taken here
        finally:
            ops.use({} if kernels is None else kernels)
    return one_of_each(calls)


def calls_of_ranks(
    make_calls: Callable[..., list[Call]],
    ranks: int,
    stages: int = 1,
    *,
    whole_experts: bool = False,
    replicas: int = 1,
    transport: Transport = "allgather_reducescatter",
) -> list[Call]:
    """The calls that so many ranks of each stage make, one for each variant.

    `make_calls` is `model_calls` with all arguments but `parallel`. `whole_experts`: whether ranks share
    experts, instead of the width of each. `replicas`: how many share them, with so many ranks each.
    """
    sharing = ranks * replicas if whole_experts else 1
    places = [
        Parallel(
            rank,
            ranks,
            stage=stage,
            stages=stages,
            experts=ExpertPlace(replica * ranks + rank, sharing, transport=transport)
            if sharing > 1
            else None,
            replicas=Replicas(replica, replicas, _OtherRanks(replicas)) if replicas > 1 else None,
        )
        for stage in range(stages)
        for replica in range(replicas)
        for rank in range(ranks)
    ]
    return one_of_each(call for place in places for call in make_calls(parallel=place))


def opening_calls(capability: int, dim: int, dtype: torch.dtype, uses: Uses | None = None) -> list[Call]:
    """The calls that prove kernels for a model whose heads are `dim` wide.

    `uses`: what it asks of operations; None, or what is not known: all are proved.
    """
    table = cuda_operations(Card(capability, _PROCESSORS))
    with torch.inference_mode(), ShapesOnly(), collecting() as calls:
        for case in cases_on(NOWHERE, dim, dtype, uses if uses is not None and uses.is_known else None):
            if case.name in table:
                case.compute(table)
        draw(_no_logits(*PROVED), filters(NOWHERE))
    return one_of_each(calls)


def one_of_each(calls: Iterable[Call]) -> list[Call]:
    """One call for each variant."""
    return list({describe(call): call for call in calls}.values())


def compile_ahead(calls: Sequence[Call], capability: int, threads: int = 1) -> Iterator[Compiled]:
    """Compile these calls' variants for a compute capability such as 90, in their order.

    Nothing can be computed on a device in this process afterwards.
    """
    driver.set_active(_NoDevice(capability))  # pyright: ignore[reportArgumentType]
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(_compile, calls)


@contextmanager
def compiling(
    make_calls: Callable[[], Sequence[Call]], target: torch.device | None, turn: tuple[int, int] = (0, 1)
) -> Iterator[None]:
    """Compile calls' variants in threads, for the card of this process, and wait for them at the end.

    A variant that fails to compile, or whose call is not made here, is compiled when it is first started.
    `turn`: the number of this process on its machine, and how many there are. Each begins with another part
    of the list and goes through all of it, and finds in Triton's cache what others have compiled meanwhile.
    Raises `Unsupported` at once if the model has layers without kernels.
    """
    number, count = turn
    threads = max(1, min(_MOST_THREADS, (usable_cores() - 1) // count))
    begin = None if target is None else partial(torch.cuda.set_device, target)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="compile", initializer=begin)
    made: list[Future[Any]] = []
    try:
        try:
            calls = make_calls()
            first = len(calls) * number // count
            made = [pool.submit(call.prepare) for call in [*calls[first:], *calls[:first]]]
        except Unsupported:
            raise
        except Exception as error:
            logger.warning("kernels are not compiled ahead, but when first started: %s", error)
        yield
        errors = [error for one in made if (error := one.exception()) is not None]
        if errors:
            logger.warning("%d of %d kernels did not compile ahead: %s", len(errors), len(made), errors[0])
    finally:
        pool.shutdown(cancel_futures=True)


def describe(call: Call) -> str:
    """The name of a call's variant: its kernel, and the arguments that differ between variants."""
    words = [_word(*pair) for pair in zip(call.kernel.params, call.arguments, strict=True)]
    return f"{call.kernel.fn.__name__}({', '.join(words)}) {call.options}"


def _take_steps(model: ServedModel, given: LoadOptions, block_size: int, cache_dtype: torch.dtype) -> None:
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
        stream = None if parallel.first else _nowhere((sum(new), width), given.dtype)
        step = _step(new, total if model.causal else new, block_size, parallel)
        for last in tables:
            step.last = last if last is None else last[: sum(new)]
            with use_context(step):
                model.forward(_nowhere((sum(new),), torch.int64), step.positions, stream)
    _lay_out_tokens(block_size, paged=model.causal)
    if given.conversion is not None and given.conversion.runner == "generate" and parallel.last:
        for rows in _SAMPLED:
            model.logits(_nowhere((rows, config.output_size), given.dtype))
        windows = {layer.window for layer in model.attention_layers() if isinstance(layer, Attention)}
        _choose_tokens(config.vocab_size, block_size, groups=min(2, len(windows)) or 1)
    if parallel.last:
        _pool(config.output_size, given.dtype)


def _all_are_chosen() -> AbstractContextManager[Any]:
    """Let "meta" tensors be asked which elements are not zero, as what sends tokens to experts does: all."""
    return meta_rules.patch(meta_nonzero_assume_all_nonzero=True)  # pyright: ignore[reportAttributeAccessIssue]


def _alone(parallel: Parallel) -> Parallel:
    """The same rank without the others, which take no part.

    Where a token goes to the ranks of its experts alone, these multiply rows of one expert each, wherever
    they came from: so there are no other replicas to ask.
    """
    place, replicas = parallel.experts, parallel.replicas
    if replicas is not None:
        replicas = replace(replicas, group=_OtherRanks(replicas.size))
    if place is not None and place.transport == "all_to_all":
        replicas = None
    return replace(parallel, group=_OtherRanks(parallel.size), replicas=replicas)


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
        replica_tokens=[tokens] * (1 if parallel.replicas is None else parallel.replicas.size),
    )


def _no_states(shape: tuple[int, ...]) -> Tensor:
    """Two places of states without memory, which begin at multiples of so many numbers as a worker's do."""
    size = prod(shape)
    return _nowhere((2, -(-size // _ALIGNED) * _ALIGNED), torch.float32)[:, :size].unflatten(1, shape)


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
    states = SlotStates(slots).table
    layouts.lay_out_single_tokens(_nowhere((64,), torch.int32), states, slots, steps, lens)
    blocks = Launch(lens, lens, Tiles(16, 64, 4, 3), Kind.SHORT)
    layouts.lay_out_splits(lens, {(Heads(1, 1, 64), torch.bfloat16, True): [blocks]}, _PROCESSORS)
    layouts.lay_out_sampling(
        _nowhere((4,), torch.int32), states, slots, layouts.SampleTensors.make(NOWHERE, 4)
    )
    draw(_no_logits(4, vocab_size), filters(NOWHERE))


def _no_logits(rows: int, vocab_size: int) -> GroupedLogits:
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


def _word(parameter: Any, argument: Any) -> str:
    """What a variant is compiled for: a constant, a type, or whether 16 divides a number or it is 1.

    A tensor that begins at another address than a multiple of 16 is "between" them.
    """
    if isinstance(argument, Tensor):
        return str(argument.dtype).removeprefix("torch.") + " between" * (argument.data_ptr() % _ALIGNED > 0)
    if parameter.is_constexpr or argument is None:
        return str(argument)
    if isinstance(argument, tuple):
        return str([_word(parameter, each) for each in cast("tuple[Any, ...]", argument)])
    if isinstance(argument, float) or parameter.do_not_specialize:
        return type(argument).__name__
    if argument == 1:
        return "1"
    return ("int16" if argument % _ALIGNED == 0 else "int") + " wide" * (abs(argument) >= 1 << 31)


def _compile(call: Call) -> Compiled:
    return inspect(describe(call), call.prepare())
