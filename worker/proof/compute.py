"""Computes prompts with a runner of its own, and notes the hidden states behind each layer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from models import ops
from models.fingerprint import digest_weights
from worker.buffers import Buffer
from worker.kernels.compare_with_reference import HEAD_DIM, cases_by_type
from worker.kernels.cpu import operations as cpu_operations
from worker.proof.messages import Computed, OperationCheck, Proof, ProofOrder
from worker.protocol import EncodeSource, NewSeq, Pooling, Sampling, SeqStep, StepInput, StepOutput
from worker.runner import Runner
from worker.tasks import samples

_FIRST_STEP = 1 << 20
"""A number beyond those of the steps that a runner takes when it starts."""


def prove(order: ProofOrder) -> Proof:
    """Compute all prompts twice: layer by layer, and as a server does, which replays small steps.

    Of several ranks one tells the answers; the layers of all are the same.
    """
    layers: list[list[bytes]] = []
    noted: list[bytes] = []

    def note(module: nn.Module, _given: object, result: Any) -> None:
        if type(module).__name__.endswith("Layer"):
            noted.append(_last_row(result).numpy().tobytes())

    hook = register_module_forward_hook(note)  # a model that is observed is not replayed
    try:
        with _opened(order) as runner:
            for number in range(len(order.prompts)):
                noted.clear()
                _first(runner, order, number)
                layers.append(list(noted))
    finally:
        hook.remove()
    with _opened(order) as runner:
        computed = [_compute(runner, order, number, each) for number, each in enumerate(layers)]
        target = torch.device(runner.facts.device)
        operations = list(compare_operations(order.config.model.head_dim, target)) if order.operations else []
        config = order.config
        weights = digest_weights(Path(config.folder), config.options.load_format, config.options.seed)
        return Proof(str(target), _kernels(target), runner.facts.dtype, weights, computed, operations)


def _kernels(target: torch.device) -> str:
    if target.type != "cpu":
        return torch.cuda.get_device_name(target)
    library, _ = cpu_operations.choose_kernels()
    return "torch" if library is None else library.level.name


@contextmanager
def _opened(order: ProofOrder) -> Iterator[Runner]:
    runner = Runner(order.config, lambda phase, fraction: None)
    try:
        yield runner
    finally:
        runner.close()


def _compute(runner: Runner, order: ProofOrder, number: int, layers: list[bytes]) -> Computed:
    prompt, length = order.prompts[number], order.length
    output = _first(runner, order, number)
    if not samples(runner.facts.tasks):
        pooled = [
            torch.frombuffer(bytearray(each.data), dtype=torch.float32) for each in output.pooled.values()
        ]
        return Computed(layers, vector=torch.cat(pooled).tolist() if pooled else [])
    outputs = [output]
    for index in range(1, length):
        step = SeqStep(0, len(prompt) + index - 1, 1, [], samples=True, output_index=index)
        outputs.append(_take(runner, StepInput(_FIRST_STEP + number * length + index, [], [step])))
    told = [found for each in outputs for found in each.logprobs if found is not None]
    return Computed(
        layers, [token for each in outputs for token in each.tokens], [each.values[0] for each in told]
    )


def _first(runner: Runner, order: ProofOrder, number: int) -> StepOutput:
    """Take the step that reads a prompt, whose sequence has the slot and the blocks of the one before."""
    facts, prompt, length = runner.facts, order.prompts[number], order.length
    generates = samples(facts.tasks)
    params = Sampling(length, temperature=0.0, logprobs=0) if generates else Pooling("embed")
    count = -(-(len(prompt) + length) // facts.block_size) * len(facts.windows) if facts.causal else 0
    seq = SeqStep(0, 0, len(prompt), list(range(count)), samples=generates, pools=not generates)
    blocks = list(range(-(-facts.source_len // facts.block_size)))
    heard = order.features[number : number + 1]
    sources = [EncodeSource([], Buffer(each), facts.source_len, blocks) for each in heard]
    new = NewSeq(0, list(prompt), len(prompt), params, source_blocks=blocks, source_len=facts.source_len)
    return _take(runner, StepInput(_FIRST_STEP + number * length, [new], [seq], sources=sources))


def _take(runner: Runner, step: StepInput) -> StepOutput:
    output = runner.launch(step).result()
    if output.failed:
        raise RuntimeError(output.failed[0])
    return output


def _last_row(result: Any) -> Tensor:
    """The hidden state of the last token: what is still to be added to the stream is added."""
    parts = [
        each for each in (result if isinstance(result, tuple) else (result,)) if isinstance(each, Tensor)
    ]
    return sum((each[-1].float() for each in parts[1:]), parts[0][-1].float()).cpu()


def compare_operations(head_dim: int, target: torch.device) -> Iterator[OperationCheck]:
    """Compare each operation that the device has of its own with its reference, as a start does."""
    if target.type == "cpu":
        table, cases_of = cpu_operations.choose_kernels()[1], cases_by_type(HEAD_DIM, None)
    else:
        table = {name: getattr(ops, name) for name in ops.SPECIFIED}
        cases_of = cases_by_type(head_dim, target)
    for dtype, cases in cases_of.items():
        worst: dict[str, float] = {}
        for case in cases:
            if case.name in ops.SPECIFIED and table.get(case.name) not in (None, ops.SPECIFIED[case.name]):
                found, expected = case.compute(table), case.compute(ops.SPECIFIED)
                worst[case.name] = max(worst.get(case.name, 0.0), _distance(found, expected, case.tolerance))
        for name, difference in worst.items():
            yield OperationCheck(name, str(dtype).removeprefix("torch."), difference)


def _distance(found: Any, expected: Any, tolerance: float) -> float:
    """The largest difference, in parts of what the check at every start allows."""
    if isinstance(expected, tuple):
        return max((_distance(*pair, tolerance) for pair in zip(found, expected, strict=True)), default=0.0)
    found, expected = found.float(), expected.float()
    same = (found == expected) | (found.isnan() & expected.isnan())
    apart = (found - expected).abs() / (tolerance * 5 + tolerance * expected.abs())
    apart = torch.where(same, 0.0, apart).nan_to_num(nan=float("inf"))
    return float(apart.max()) if apart.numel() else 0.0


def main() -> None:
    """Read an order from standard input, and write the proof to standard output."""
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ProofOrder)
    sys.stdout.buffer.write(msgspec.msgpack.encode(prove(order)))


if __name__ == "__main__":
    main()
