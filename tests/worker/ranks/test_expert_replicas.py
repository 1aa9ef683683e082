"""Real ranks of replicas that share experts: one worker's tokens, and bits that depend on no other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from mixtures import FAMILIES
from msgspec.structs import replace
from ranks import Layout, Ranks
from sizes import worker_config
from tiny import tiny_checkpoint

from models.config import read_config
from models.parallel.experts import Placement, Transport
from worker.config import Balancing
from worker.protocol import ExpertReport, NewSeq, Sampling, SeqStep, StepInput, StepOutput

PROMPTS = [list(range(40, 63)), [9] * 17, list(range(7, 12)), [3, 250, 4]]
SIZES = [7, 2, 5, 3]
OUTPUT = 4
BLOCK = 4
SIZE = {"block_size": BLOCK, "num_gpu_blocks_override": 32, "max_model_len": 64, "cpu_threads": 1}


@dataclass
class Text:
    """The one sequence of a replica: its prompt is read in chunks, then tokens follow."""

    prompt: list[int]
    chunk: int
    done: int = 0
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    length: int = OUTPUT
    reports: list[ExpertReport] = field(default_factory=list[ExpertReport])

    @property
    def left(self) -> bool:
        return len(self.tokens) < self.length

    def step(self, number: int) -> StepInput:
        if not self.left:
            return StepInput(number=-number, new=[], seqs=[])
        params = Sampling(max_tokens=self.length, temperature=0, logprobs=0)
        new = [] if self.done else [NewSeq(0, self.prompt, len(self.prompt), params)]
        blocks = [] if self.done else list(range(8))
        count = min(self.chunk, len(self.prompt) - self.done) or 1
        samples = self.done + count >= len(self.prompt)
        seq = SeqStep(0, self.done, count, blocks, samples=samples, output_index=len(self.tokens))
        self.done += count
        if self.tokens:
            seq = replace(seq, start=len(self.prompt) + len(self.tokens) - 1, count=1)
        return StepInput(number=number, new=new, seqs=[seq])

    def take(self, output: StepOutput) -> None:
        if output.experts is not None:
            self.reports.append(output.experts)
        if output.tokens and output.tokens[0] >= 0:
            self.tokens.append(output.tokens[0])
            entry = output.logprobs[0]
            assert entry is not None
            self.logprobs.append(entry.values[0])


def run(
    ranks: Ranks,
    folder: Path,
    layout: Layout,
    sizes: Sequence[int] = SIZES,
    *,
    length: int = OUTPUT,
    balancing: Balancing | None = None,
    options: Mapping[str, object] | None = None,
) -> list[Text]:
    """Each replica writes one text; those that are done take part without rows of their own."""
    shared = ranks.rendezvous()
    config = worker_config(folder=str(folder), model=read_config(folder, {}), **SIZE, **(options or {}))
    config = replace(config, balancing=balancing)
    replicas = [layout.places_of(number, ranks.rendezvous(), shared) for number in range(layout.replicas)]
    ranks.open([replace(config, place=place) for places in replicas for place in places])
    texts = [Text(prompt, size, length=length) for prompt, size in zip(PROMPTS, sizes, strict=False)][
        : layout.replicas
    ]
    pipes = [ranks.pipes[number * layout.size :][: layout.size] for number in range(layout.replicas)]
    number = 0
    while any(text.left for text in texts):
        number += 1
        steps = [text.step(number) for text in texts]
        counts = [sum(seq.count for seq in step.seqs) for step in steps] if layout.replicas > 1 else []
        for own, step in zip(pipes, steps, strict=True):
            for pipe in own:
                pipe.send_bytes(b"s" + msgspec.msgpack.encode(replace(step, replica_tokens=counts)))
        for own, text in zip(pipes, texts, strict=True):
            text.take(msgspec.msgpack.decode(ranks.hear(own[0])[1:], type=StepOutput))
    ranks.close_model(layout.size * layout.replicas)
    return texts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("transport", ["allgather_reducescatter", "all_to_all"])
def test_replicas_have_the_tokens_of_one_worker(
    family: str, transport: Transport, ranks: Ranks, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(family, tmp_path, **FAMILIES[family])
    alone = [run(ranks, folder, Layout(), [size])[0] for size in SIZES[:1]]
    for tensor, replicas in ((1, 2), (1, 4), (2, 2)):
        found = run(ranks, folder, Layout(tensor, 1, "linear", transport, replicas))
        assert found[0].tokens == alone[0].tokens
        assert found[0].logprobs == pytest.approx(alone[0].logprobs, abs=1e-4)


@pytest.mark.parametrize("transport", ["allgather_reducescatter", "all_to_all"])
def test_bits_depend_on_no_other_replica(transport: Transport, ranks: Ranks, tmp_path: Path) -> None:
    folder = tiny_checkpoint("Qwen2MoeForCausalLM", tmp_path, **FAMILIES["Qwen2MoeForCausalLM"])
    layout = Layout(1, 1, "linear", transport, 2)
    expected = run(ranks, folder, layout, [7, 2])[0]
    for sizes in ([5, 17], [23, 1]):
        found = run(ranks, folder, layout, sizes)[0]
        assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_returns_apart_has_the_same_bits_wherever_experts_lie(
    family: str, ranks: Ranks, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(family, tmp_path, **FAMILIES[family])
    layouts: list[tuple[int, int, Placement]] = [
        *((1, 4, "linear"), (1, 4, "round_robin"), (2, 2, "linear"), (4, 1, "round_robin"))
    ]
    results = [
        run(ranks, folder, Layout(tensor, 1, placement, "all_to_all", replicas))[0]
        for tensor, replicas, placement in layouts
    ]
    for found in results[1:]:
        assert (found.tokens, found.logprobs) == (results[0].tokens, results[0].logprobs)


# Experts that are copied and moved by load.


LENGTH = 9


def balancing(copies: int, use_async: bool) -> Balancing:
    """Load is measured before the steps 1, 4, 7, ..., when some replicas are done and idle."""
    return Balancing(num_redundant_experts=copies, window_size=4, step_interval=3, use_async=use_async)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_same_before_during_and_after_moves(
    family: str, ranks: Ranks, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(family, tmp_path, **FAMILIES[family])
    fixed = run(ranks, folder, Layout(1, 1, "linear", "all_to_all", 4), length=LENGTH)
    for tensor, replicas, use_async in ((2, 1, True), (1, 2, False), (1, 4, True), (2, 2, True)):
        layout = Layout(tensor, 1, "linear", "all_to_all", replicas)
        found = run(ranks, folder, layout, length=LENGTH, balancing=balancing(tensor * replicas, use_async))
        for text, expected in zip(found, fixed, strict=False):
            assert (text.tokens, text.logprobs) == (expected.tokens, expected.logprobs)
        rearranged = sum(len(report.rearrangements) for report in found[0].reports)
        assert rearranged >= 1
        measured = [report.balancedness for report in found[0].reports if report.balancedness]
        assert len(measured) > 2
        assert all(1 / layout.size / replicas <= each.least <= each.p90 <= each.p50 <= 1 for each in measured)


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "int8-dynamic"])
def test_packed_bytes_move_in_every_form(quantization: str | None, ranks: Ranks, tmp_path: Path) -> None:
    family = "Qwen2MoeForCausalLM"
    folder = tiny_checkpoint(family, tmp_path, **FAMILIES[family])
    options = {"dtype": "bfloat16", "quantization": quantization}
    layout = Layout(1, 1, "linear", "all_to_all", 2)
    fixed = run(ranks, folder, layout, length=LENGTH, options=options)
    found = run(ranks, folder, layout, length=LENGTH, options=options, balancing=balancing(2, True))
    for text, expected in zip(found, fixed, strict=True):
        assert (text.tokens, text.logprobs) == (expected.tokens, expected.logprobs)
    assert sum(len(report.rearrangements) for report in found[0].reports) >= 1
