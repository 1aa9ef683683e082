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
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as meta_rules

from models import ops
from models.config import ModelConfig
from models.conversion.conversion_choice import Conversion, resolve_conversion
from models.layers.delta import ChannelDelta
from models.layers.latent_attention import TokenIndexer
from models.layers.mamba import ChannelScan
from models.loader import LoadOptions, load_model
from models.parallel.parallel import Parallel
from models.towers.model import find_tower
from worker.calls.lora_store import Adapters
from worker.host.machine import usable_cores
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.compiling.shapes_only import ShapesOnly
from worker.kernels.cuda.compiling.steps_without_memory import (
    ALIGNED,
    NOWHERE,
    PROCESSORS,
    find_tops_of,
    no_logits,
    take_steps,
)
from worker.kernels.cuda.draw_kernel import PROVED, draw, filters
from worker.kernels.cuda.kernel_self_test import cases_on
from worker.kernels.cuda.launch import KernelLaunch, collecting
from worker.kernels.cuda.operations import cuda_operations
from worker.kernels.operations_used import Uses
from worker.options import LoraOptions

logger = logging.getLogger(__name__)


class Unsupported(ValueError):
    """The model runs on CPUs only so far. The message says which of its layers is the reason."""


_REASONS = {
    ChannelDelta: "Kimi delta attention",
    ChannelScan: "the scan of the first Mamba (Mamba, Falcon Mamba, Jamba)",
    TokenIndexer: "the indexer that chooses what attention reads (DeepSeek-V3.2, GLM-5)",
}


def refuse_unsupported(modules: Iterable[nn.Module]) -> None:
    """Raise `Unsupported` for the first layer without kernels."""
    for module in modules:
        if reason := _REASONS.get(type(module)):
            raise Unsupported(
                f"the model runs on CPUs only so far: there are no kernels for CUDA of {reason}; "
                "pass --device cpu"
            )


_MOST_THREADS = 16


class OtherRanks:
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

    def exchange(self, out: Sequence[Tensor], into: Sequence[Tensor]) -> OtherRanks:
        return self

    def wait(self) -> None:
        return None


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
    lora: LoraOptions = LoraOptions(),
) -> list[KernelLaunch]:
    """The calls of kernels that a model makes, one for each variant; a cache has its type by default.

    `kernels`: the operations that are bound already, and stay so; None: those of any card with this
    capability. `parallel`: the rank whose pieces are computed; no other one takes part. `conversion`: what
    the model is served as; None: what a server would choose. `uses` notes what it asks of operations. `lora`
    says whether it has adapters.
    """
    parallel = _alone(parallel)
    conversion = conversion or resolve_conversion(config, folder)
    with torch.inference_mode(), _all_are_chosen(), ShapesOnly(), collecting() as calls:
        table = cuda_operations(Card(capability, PROCESSORS)) if kernels is None else kernels
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
            if lora.enable_lora:
                Adapters(lora, options, model)
            take_steps(model, options, block_size, cache_dtype or dtype)
            if uses is not None:
                uses.is_known = find_tower(model) is None  # whose steps are not taken here
        finally:
            ops.use({} if kernels is None else kernels)
    return one_of_each(calls)


def opening_calls(
    capability: int, dim: int, dtype: torch.dtype, uses: Uses | None = None
) -> list[KernelLaunch]:
    """The calls that prove kernels for a model whose heads are `dim` wide.

    `uses`: what it asks of operations; None, or what is not known: all are proved.
    """
    table = cuda_operations(Card(capability, PROCESSORS))
    with torch.inference_mode(), ShapesOnly(), collecting() as calls:
        for case in cases_on(NOWHERE, dim, dtype, uses if uses is not None and uses.is_known else None):
            if case.name in table:
                case.compute(table)
        draw(no_logits(*PROVED), filters(NOWHERE))
        find_tops_of(3, 5)
    return one_of_each(calls)


def one_of_each(calls: Iterable[KernelLaunch]) -> list[KernelLaunch]:
    """One call for each variant."""
    return list({describe(call): call for call in calls}.values())


@contextmanager
def compiling(
    make_calls: Callable[[], Sequence[KernelLaunch]],
    target: torch.device | None,
    turn: tuple[int, int] = (0, 1),
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


def describe(call: KernelLaunch) -> str:
    """The name of a call's variant: its kernel, and the arguments that differ between variants."""
    words = [_word(*pair) for pair in zip(call.kernel.params, call.arguments, strict=True)]
    return f"{call.kernel.fn.__name__}({', '.join(words)}) {call.options}"


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
        replicas = replace(replicas, group=OtherRanks(replicas.size))
    if place is not None and place.transport == "all_to_all":
        replicas = None
    return replace(parallel, group=OtherRanks(parallel.size), replicas=replicas)


def _word(parameter: Any, argument: Any) -> str:
    """What a variant is compiled for: a constant, a type, or whether 16 divides a number or it is 1.

    A tensor that begins at another address than a multiple of 16 is "between" them.
    """
    if isinstance(argument, Tensor):
        return str(argument.dtype).removeprefix("torch.") + " between" * (argument.data_ptr() % ALIGNED > 0)
    if parameter.is_constexpr or argument is None:
        return str(argument)
    if isinstance(argument, tuple):
        return str([_word(parameter, each) for each in cast("tuple[Any, ...]", argument)])
    if isinstance(argument, float) or parameter.do_not_specialize:
        return type(argument).__name__
    if argument == 1:
        return "1"
    return ("int16" if argument % ALIGNED == 0 else "int") + " wide" * (abs(argument) >= 1 << 31)
