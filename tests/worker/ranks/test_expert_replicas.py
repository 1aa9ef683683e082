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
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput, StepOutput

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
    options: Mapping[str, object] | None = None,
) -> list[Text]:
    """Each replica writes one text; those that are done take part without rows of their own."""
    shared = ranks.rendezvous()
    config = worker_config(folder=str(folder), model=read_config(folder, {}), **SIZE, **(options or {}))
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
    alone = run(ranks, folder, Layout(), SIZES[:1])[0]
    layouts: list[tuple[int, int, Placement]] = [
        *((1, 4, "linear"), (1, 4, "round_robin"), (2, 2, "linear"), (4, 1, "round_robin"))
    ]
    results = [
        run(ranks, folder, Layout(tensor, 1, placement, "all_to_all", replicas))[0]
        for tensor, replicas, placement in layouts
    ]
    assert results[0].tokens == alone.tokens
    assert results[0].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    for found in results[1:]:
        assert (found.tokens, found.logprobs) == (results[0].tokens, results[0].logprobs)
