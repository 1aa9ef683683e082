"""Engines that share experts, each with a real rank: halves of steps change no bit of any text."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest
import zmq
from mixtures import FAMILIES
from model_facts import READY
from msgspec.structs import replace
from no_calls import NoCalls
from ranks import Layout, Ranks
from sizes import engine_config, worker_config
from tiny import tiny_checkpoint

from engine_core.engine import Engine
from engine_core.features.installed import make_scheduler
from engine_core.protocol import Add, Tokens
from engine_core.ranks.joint_steps import Halving, JointExecutor
from engine_core.ranks.peers import Peers
from models.config import read_config
from models.parallel.experts import Transport
from worker.protocol import Sampling, StepBounds, StepInput, StepOutput
from worker.worker_facts import WorkerFacts

PROMPTS = [list(range(40, 63)), [9] * 17, list(range(7, 14)), [3, 250, 4]]
"""The prompts of two engines, which take turns."""
SIZE = {"block_size": 4, "num_gpu_blocks_override": 64, "max_model_len": 64, "max_num_batched_tokens": 20}


class RealRank(NoCalls):
    """The executor of an engine whose only rank is a process of the tests."""

    def __init__(self, ranks: Ranks, index: int, facts: WorkerFacts) -> None:
        self._ranks, self._pipe, self._facts = ranks, ranks.pipes[index], facts
        self.steps: list[StepInput] = []
        self.outputs: list[StepOutput] = []

    def start(self) -> WorkerFacts:
        return self._facts

    def submit(self, step: StepInput) -> RealStep:
        self._pipe.send_bytes(b"s" + msgspec.msgpack.encode(step))
        self.steps.append(step)
        return RealStep(self, len(self.steps))

    def hear(self) -> None:
        """Wait for the output of the next step."""
        self.outputs.append(msgspec.msgpack.decode(self._ranks.hear(self._pipe)[1:], type=StepOutput))

    def receive(self) -> None:
        while self._pipe.poll():
            self.hear()

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._pipe.fileno(), zmq.POLLIN)

    def bind(self, bounds: StepBounds) -> None: ...

    def idle(self, *, wait: bool = False) -> bool:
        return False

    def check(self) -> None: ...

    def stop(self) -> None: ...


class RealStep:
    def __init__(self, executor: RealRank, count: int) -> None:
        self._executor, self._count = executor, count

    def done(self) -> bool:
        self._executor.receive()
        return len(self._executor.outputs) >= self._count

    def result(self) -> StepOutput:
        while not self.done():
            self._executor.hear()
        return self._executor.outputs[self._count - 1]


def write(
    ranks: Ranks, folder: Path, transport: Transport, halving: Halving | None
) -> tuple[dict[int, list[Tokens]], list[StepInput]]:
    """What the engines answer, and the steps of the first one."""
    model, layout = read_config(folder, {}), Layout(1, 1, "linear", transport, 2)
    config, shared = worker_config(folder=str(folder), model=model, cpu_threads=1, **SIZE), ranks.rendezvous()
    places = [layout.places_of(number, ranks.rendezvous(), shared)[0] for number in range(2)]
    opened = ranks.open([replace(config, place=place) for place in places])
    ends, poller = socket.socketpair(), zmq.Poller()
    executors = [RealRank(ranks, index, facts) for index, (facts, _) in enumerate(opened)]
    engines: list[Engine] = []
    for index, end in enumerate(ends):
        end.setblocking(False)
        joint = JointExecutor(executors[index], index, Peers({1 - index: end}), halving)
        scheduler = make_scheduler(engine_config("", **SIZE), joint.start(), model.vocab_size)
        engines.append(Engine(READY, scheduler, joint))
    for id, prompt in enumerate(PROMPTS):
        params = Sampling(max_tokens=5, temperature=0, logprobs=2)
        engines[id % 2].add(0, Add(id=id, tokens=prompt, params=params))
    answers: dict[int, list[Tokens]] = {}
    while not all(engine.idle for engine in engines):
        if all(engine.idle or engine.waits for engine in engines):
            poller.poll()
        for engine in engines:
            for answer in engine.step(wait=False).get(0, []):
                assert isinstance(answer, Tokens)
                answers.setdefault(answer.id, []).append(answer)
            engine.register(poller)
    for engine in engines:
        engine.stop()
    ranks.close_model(2)
    return answers, executors[0].steps


def texts(answers: dict[int, list[Tokens]]) -> dict[int, tuple[list[int], list[tuple[float, ...]]]]:
    """The tokens of each answer, and their log-probabilities."""
    return {
        id: (
            [token for answer in own for token in answer.tokens],
            [tuple(entry.values) for answer in own for entry in answer.logprobs],
        )
        for id, own in answers.items()
    }


@pytest.mark.parametrize("transport", ["allgather_reducescatter", "all_to_all"])
def test_texts_do_not_depend_on_halves(transport: Transport, ranks: Ranks, tmp_path: Path) -> None:
    folder = tiny_checkpoint("Qwen2MoeForCausalLM", tmp_path, **FAMILIES["Qwen2MoeForCausalLM"])
    whole, steps = write(ranks, folder, transport, None)
    assert not any(step.first_halves for step in steps)
    assert all(len(tokens) == 5 for tokens, _ in texts(whole).values())
    in_halves, steps = write(ranks, folder, transport, Halving(decode_tokens=2, prompt_tokens=6))
    assert texts(in_halves) == texts(whole)
    assert steps[0].first_halves == [10, 10], "both begin with chunks of their first prompts"
    assert any(step.first_halves for step in steps if all(seq.count == 1 for seq in step.seqs))
