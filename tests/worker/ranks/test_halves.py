"""Real ranks of replicas that compute each step in two halves: the outputs of whole steps, bit for bit."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from mixtures import FAMILIES
from msgspec.structs import replace
from ranks import Layout, Ranks
from sizes import worker_config
from tiny import tiny_checkpoint

from models.config import read_config
from models.parallel.experts import Transport
from worker.config import Balancing
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput, StepOutput

PROMPTS = [[list(range(40, 63)), [9, 8, 7, 6, 5, 4]], [list(range(60, 77)), [3, 250, 4, 1]]]
"""The two prompts of each replica."""
STEPS = [
    [{0: 16}, {0: 7, 1: 3}, {0: 1, 1: 3}, {0: 1, 1: 1}, {0: 1, 1: 1}],
    [{0: 9, 1: 2}, {0: 8, 1: 2}, {0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}],
]
"""The tokens of each sequence in the steps of each replica: of prompts, of both kinds, and of decodes."""
MIDDLES = [[8, 5, 1, 1, 1], [5, 5, 1, 1, 1]]
"""Most of the first halves end within a prompt."""
UNEVEN = [[1, 9, 3, 1, 1], [9, 1, 1, 1, 1]]
"""Some end between two rows, some have one token, and in some steps both replicas have different ones."""
BLOCK = 4
SIZE = {"block_size": BLOCK, "num_gpu_blocks_override": 32, "max_model_len": 64, "cpu_threads": 1}
LATENT = {"DeepseekV32ForCausalLM": {"n_routed_experts": 8}}
TRANSPORTS: list[Transport] = ["allgather_reducescatter", "all_to_all"]


def steps_of(replica: int) -> list[StepInput]:
    """All steps of a replica, which samples behind its prompts."""
    done, steps = {0: 0, 1: 0}, list[StepInput]()
    for number, counts in enumerate(STEPS[replica], 1):
        new, seqs = list[NewSeq](), list[SeqStep]()
        for slot, count in counts.items():
            prompt, start = PROMPTS[replica][slot], done[slot]
            params = Sampling(max_tokens=8, temperature=0, logprobs=2, prompt_logprobs=1 - slot)
            blocks = [] if start else list(range(8 * slot, 8 * slot + 8))
            if not start:
                new.append(NewSeq(slot, prompt, len(prompt), params))
            samples, index = start + count >= len(prompt), max(0, start - len(prompt) + 1)
            seqs.append(SeqStep(slot, start, count, blocks, samples=samples, output_index=index))
            done[slot] += count
        steps.append(StepInput(number=number, new=new, seqs=seqs))
    return steps


def run(
    ranks: Ranks,
    folder: Path,
    layout: Layout,
    first_halves: Sequence[Sequence[int]] | None = None,
    balancing: Balancing | None = None,
) -> list[list[StepOutput]]:
    """The outputs of both replicas, in whole steps or in halves."""
    shared = ranks.rendezvous()
    config = worker_config(folder=str(folder), model=read_config(folder, {}), **SIZE)
    config = replace(config, balancing=balancing)
    replicas = [layout.places_of(number, ranks.rendezvous(), shared) for number in range(layout.replicas)]
    ranks.open([replace(config, place=place) for places in replicas for place in places])
    pipes = [ranks.pipes[number * layout.size :][: layout.size] for number in range(layout.replicas)]
    outputs: list[list[StepOutput]] = [[] for _ in replicas]
    for index, steps in enumerate(zip(*map(steps_of, range(layout.replicas)), strict=True)):
        counts = [sum(seq.count for seq in step.seqs) for step in steps]
        firsts = [own[index] for own in first_halves] if first_halves else []
        for own, step in zip(pipes, steps, strict=True):
            step = replace(step, replica_tokens=counts, first_halves=firsts)
            for pipe in own:
                pipe.send_bytes(b"s" + msgspec.msgpack.encode(step))
        for own, collected in zip(pipes, outputs, strict=True):
            collected.append(
                msgspec.msgpack.decode(
                    ranks.hear(own[(layout.stages - 1) * layout.tensor])[1:], type=StepOutput
                )
            )
    ranks.close_model(layout.size * layout.replicas)
    return outputs


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        *((family, 1) for family in [*FAMILIES, *LATENT]),
        ("Qwen2MoeForCausalLM", 2),
        ("DeepseekV32ForCausalLM", 2),
    ],
)
def test_halves_have_the_bits_of_whole_steps(
    family: str, transport: Transport, tensor: int, ranks: Ranks, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(family, tmp_path, **{**FAMILIES, **LATENT}[family])
    layout = Layout(tensor, 1, "linear", transport, 2)
    whole = run(ranks, folder, layout)
    assert sum(token >= 0 for outputs in whole for each in outputs for token in each.tokens) == 15
    assert run(ranks, folder, layout, MIDDLES) == whole
    assert run(ranks, folder, layout, UNEVEN) == whole


def test_experts_may_move_between_steps_of_halves(ranks: Ranks, tmp_path: Path) -> None:
    """A token of a half may go to another copy of an expert than in the whole step."""
    folder = tiny_checkpoint("Qwen2MoeForCausalLM", tmp_path, **FAMILIES["Qwen2MoeForCausalLM"])
    layout, moving = (
        Layout(1, 1, "linear", "all_to_all", 2),
        Balancing(num_redundant_experts=2, step_interval=2),
    )
    whole, moved = run(ranks, folder, layout), run(ranks, folder, layout, UNEVEN, moving)
    assert any(each.experts for each in moved[0])
    assert [[replace(each, experts=None) for each in outputs] for outputs in moved] == whole


def test_a_step_of_two_stages_has_halves_too(ranks: Ranks, tmp_path: Path) -> None:
    """The stream of an earlier stage is cut where the tokens are."""
    folder = tiny_checkpoint("Qwen2MoeForCausalLM", tmp_path, **FAMILIES["Qwen2MoeForCausalLM"])
    layout = Layout(1, 2, "linear", replicas=2)
    assert run(ranks, folder, layout, MIDDLES) == run(ranks, folder, layout)
