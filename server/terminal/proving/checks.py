"""Compares what this machine computes with stored answers of transformers, and with receipts."""

from __future__ import annotations

import math
import subprocess
import sys
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from engine_core.config import EngineConfig
from engine_core.resolve_checkpoint import find_checkpoint, make_worker_config
from models.checkpoint.hub import HubError
from models.config import ConfigError, read_config
from server.terminal.console import CommandError
from server.terminal.proving.receipts import changes, difference, read_receipt, receipt_of, receipt_order
from server.terminal.proving.sounds import features, sound
from server.text.tokenizer_files import TokenizerFiles
from worker.config import Place
from worker.host.machine import cache_folder
from worker.logs import last_error
from worker.options import WorkerOptions
from worker.proof.messages import Computed, Proof, ProofOrder

_SECONDS = 600


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A text, or a sound, and what transformers computes of it."""

    text: str
    ids: list[int]
    layers: list[list[float]]
    """For each layer of the last token's hidden state the root of its mean square, and its beginning."""
    tokens: list[int] = []
    logprobs: list[float] = []
    vector: list[float] = []
    pitch: int = 0
    """The pitch in hertz of the sound that is transcribed; 0: there is none."""


class Facts(msgspec.Struct, frozen=True):
    """What transformers computes with a published checkpoint."""

    made_with: str
    tolerance: float
    """How far a hidden state may be from transformers', in parts of its size."""
    prompts: list[Prompt]


class Check(NamedTuple):
    """The result of one check."""

    name: str
    found: str
    is_right: bool


def prove(name: str, path: Path, *, with_operations: bool = True) -> Iterator[Check]:
    """Yields the checks of a model of which answers are stored in a file."""
    facts = msgspec.json.decode(path.read_bytes(), type=Facts)
    order = _order(name, WorkerOptions(dtype="float32"))
    heard = [features(sound(prompt.pitch)).tobytes() for prompt in facts.prompts if prompt.pitch]
    if not heard:
        yield _check_tokens(name, Path(order.config.folder), facts.prompts)
    length = max(1, *(len(prompt.tokens) for prompt in facts.prompts))
    prompts = [prompt.ids for prompt in facts.prompts]
    order = msgspec.structs.replace(order, prompts=prompts, length=length, features=heard)
    proof = compute(msgspec.structs.replace(order, operations=with_operations))
    yield check_layers(name, facts, proof.computed)
    yield check_answers(name, facts, proof.computed)
    if with_operations:
        yield check_operations(proof)


def check_layers(name: str, facts: Facts, computed: Sequence[Computed]) -> Check:
    """Compares hidden states, and names the first layer that differs."""
    worst, count = 0.0, len(facts.prompts[0].layers)
    for index in range(count):
        for prompt, found in zip(facts.prompts, computed, strict=True):
            if index >= len(found.layers):
                return Check(
                    f"{name}: layers", f"{len(found.layers)} are computed, and there are {count}", False
                )
            off = _distance(prompt.layers[index], found.layers[index])
            if not off <= facts.tolerance:
                return Check(
                    f"{name}: layers",
                    f"layer {index} is the first that differs: {off:.2g} of its size, where "
                    f"{facts.tolerance:g} is allowed ({prompt.text!r})",
                    False,
                )
            worst = max(worst, off)
    return Check(f"{name}: layers", f"{count} layers, largest difference {worst:.1g} of their size", True)


def _distance(expected: Sequence[float], state: bytes) -> float:
    """How far a hidden state is, in parts of its size; NaN if it is no number."""
    size, *begin = expected
    numbers = array("f", state)
    found_size = math.sqrt(math.fsum(each * each for each in numbers) / len(numbers))
    differences = [abs(found - one) for found, one in zip(numbers, begin, strict=False)]
    return max(abs(found_size - size), *differences) / size


def check_answers(name: str, facts: Facts, computed: Sequence[Computed]) -> Check:
    """Compares tokens and log-probabilities, or vectors."""
    worst = 0.0
    for prompt, found in zip(facts.prompts, computed, strict=True):
        if found.tokens[: len(prompt.tokens)] != prompt.tokens:
            at = next(
                i
                for i, pair in enumerate(zip(prompt.tokens, found.tokens, strict=False))
                if pair[0] != pair[1]
            )
            told = (
                f"token {at} of the answer to {prompt.text!r} is {found.tokens[at]}, not {prompt.tokens[at]}"
            )
            return Check(f"{name}: answers", f"{told}, though its layers are right: the head differs", False)
        pairs = [
            *zip(prompt.logprobs, found.logprobs, strict=False),
            *zip(prompt.vector, found.vector, strict=False),
        ]
        worst = max([worst, *(abs(one - other) for one, other in pairs)])
    kind = "vectors" if facts.prompts[0].vector else "answers"
    allowed = facts.tolerance * 2
    told = f"{len(facts.prompts)} {kind}, largest difference {worst:.1g}, where {allowed:g} is allowed"
    return Check(f"{name}: {kind}", told, worst <= allowed)


def check_operations(proof: Proof) -> Check:
    """Names the operations that differ from their reference by more than the check at every start allows."""
    wrong = [f"{each.name} ({each.dtype})" for each in proof.operations if not each.difference <= 1]
    if wrong:
        return Check("operations", f"{', '.join(wrong)} differ from the reference ({proof.kernels})", False)
    if not proof.operations:
        return Check("operations", "all are torch's: no kernels of ours are used here", True)
    furthest = max(proof.operations, key=lambda each: each.difference)
    told = f"{len(proof.operations)} of {proof.kernels} on {proof.device}; furthest is {furthest.name}"
    return Check("operations", f"{told}, {furthest.difference:.0%} of what is allowed", True)


def _check_tokens(name: str, folder: Path, prompts: Sequence[Prompt]) -> Check:
    tokenizer = TokenizerFiles(str(folder), str(cache_folder())).load()
    for prompt in prompts:
        if list(tokenizer.encode(prompt.text)) != prompt.ids:
            return Check(f"{name}: tokenizer", f"{prompt.text!r} is cut into other tokens", False)
    return Check(f"{name}: tokenizer", f"{len(prompts)} texts have the same tokens", True)


def keep(path: Path, model: str, options: WorkerOptions, ranks: int) -> None:
    """Writes a receipt of a model."""
    order = receipt_order(_order(model, options))
    receipt = receipt_of(model, order, compute(order, ranks), ranks)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(receipt)))
    print(f"{path}: what decides {len(order.prompts)} answers of {model}, and their digests")


def compare_with(path: Path, model: str | None, options: WorkerOptions, ranks: int) -> Iterator[Check]:
    """Computes the answers of a receipt again, and yields what differs."""
    kept = read_receipt(path)
    model = model or kept.model
    if options.dtype == "auto":
        options = msgspec.structs.replace(options, dtype=kept.dtype)
    order = receipt_order(_order(model, options))
    found = receipt_of(model, order, compute(order, ranks), ranks)
    told = difference(kept, found)
    yield Check(f"{model}: answers", told or f"{len(kept.answers)} are equal to the bit", not told)
    for change in changes(kept, found):
        yield Check("changed", change, True)


def _order(name: str, options: WorkerOptions) -> ProofOrder:
    """An order without prompts. Raises CommandError if the model cannot be found or read."""
    engine = EngineConfig(model=name, worker=options)
    try:
        folder = find_checkpoint(engine, lambda _: None)
        return ProofOrder(make_worker_config(engine, read_config(folder), folder), [], 1)
    except (HubError, ConfigError) as error:
        raise CommandError(str(error)) from None


def compute(order: ProofOrder, ranks: int = 1) -> Proof:
    """Computes in processes of their own, which import torch: one, or one for each rank."""
    with TemporaryDirectory(prefix="facet-prove-") as folder, ThreadPoolExecutor(ranks) as threads:
        met = f"file://{folder}/rendezvous" if ranks > 1 else ""
        places = [
            Place(tensor_rank=n, tensor_size=ranks, local_rank=n, local_ranks=ranks, rendezvous=met)
            for n in range(ranks)
        ]
        configs = [msgspec.structs.replace(order.config, place=place) for place in places]
        return next(threads.map(_compute, [msgspec.structs.replace(order, config=each) for each in configs]))


def _compute(order: ProofOrder) -> Proof:
    given = [sys.executable, "-m", "worker.proof.compute"]
    try:
        done = subprocess.run(
            given, input=msgspec.msgpack.encode(order), capture_output=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"computing took more than {_SECONDS} s, and was ended") from None
    if done.returncode:
        printed = done.stderr.decode(errors="replace").strip()
        raise CommandError(f"computing failed: {last_error(printed) or printed.splitlines()[-1]}")
    return msgspec.msgpack.decode(done.stdout, type=Proof)


def is_here(name: str) -> bool:
    try:
        find_checkpoint(EngineConfig(model=name), lambda _: None)
    except (HubError, ConfigError):
        return False
    return True
