"""A real model spread over ranks: the same texts and vectors as from one worker, through a whole engine.

Every family and layout is compared in tests/worker/ranks/test_cut_models.py; these tests are about the
processes.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
from drafted import asked_at_random
from msgspec.structs import replace
from ports import free_ports
from sizes import engine_config
from tiny import tiny_checkpoint

from engine_core.config import EngineConfig
from engine_core.engine import Engine
from engine_core.executor import ExecutorDead
from engine_core.protocol import AddRequest, Pooled, Tokens
from models import plugins
from models.families.decoders.llama import LlamaForCausalLM
from models.plugins import register_model
from worker.child import CANNOT_START
from worker.protocol import Pooling, Sampling

PROMPTS = [[5 + n, 17, 33, 8, 40 + 3 * n] * (2 + 3 * n) for n in range(3)]

Answers = tuple[list[list[int]], list[np.ndarray]]
"""The texts and the vectors of all prompts."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Options that make memory scarce: prompts are split, and not all running sequences can stay."""
    return engine_config(
        tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama")),
        cpu_threads=1,
        block_size=8,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=9,
        max_model_len=64,
    )


@pytest.fixture(scope="module")
def alone(config: EngineConfig) -> Answers:
    return answers(config)


def answers(config: EngineConfig) -> Answers:
    engine = Engine.start(config, lambda _: None)
    try:
        texts, vectors = {}, {}
        for id, prompt in enumerate(PROMPTS * 2):  # the second time, prefixes are cached
            engine.add(0, AddRequest(id=id, tokens=prompt, params=Sampling(max_tokens=16)))
            engine.add(1, AddRequest(id=id, tokens=prompt, params=Pooling(task="embed")))
        while engine.busy:
            for outputs in engine.step().values():
                for output in outputs:
                    if isinstance(output, Pooled):
                        vectors[output.id] = np.frombuffer(output.vectors.data, np.float32)
                    else:
                        assert isinstance(output, Tokens)
                        texts.setdefault(output.id, []).extend(output.tokens)
        assert engine.stats().preemptions and engine.stats().prefix_hits
        return [texts[id] for id in range(6)], [vectors[id] for id in range(6)]
    finally:
        engine.stop()


def assert_equal(spread: Answers, alone: Answers) -> None:
    assert spread[0] == alone[0]
    for vector, expected in zip(spread[1], alone[1], strict=True):
        np.testing.assert_allclose(vector, expected, atol=1e-5)


def test_ranks_on_two_machines(
    config: EngineConfig, alone: Answers, node: Callable[[EngineConfig], None]
) -> None:
    spread = over_two_machines(replace(config, pipeline_parallel_size=2))
    node(spread)
    assert_equal(answers(spread), alone)


def test_a_drafter_on_two_machines(
    config: EngineConfig, alone: Answers, node: Callable[[EngineConfig], None]
) -> None:
    drafting = {"method": "draft_model", "model": config.model}
    spread = over_two_machines(replace(config, tensor_parallel_size=2, speculative_config=drafting))
    node(spread)
    with asked_at_random(Random(1)) as drafted:
        assert_equal(answers(spread), alone)
    assert len(drafted.drafts) > 10


def test_a_machine_with_another_drafter_is_refused(
    config: EngineConfig, node: Callable[[EngineConfig], None]
) -> None:
    drafting = {"method": "draft_model", "model": config.model}
    spread = over_two_machines(replace(config, tensor_parallel_size=2, speculative_config=drafting))
    node(replace(spread, speculative_config=None))
    with pytest.raises(ExecutorDead, match="its drafter is not the engine's: give the same"):
        answers(spread)


def over_two_machines(config: EngineConfig) -> EngineConfig:
    port = free_ports(2, "127.0.0.2")
    return replace(config, nnodes=2, master_addr="127.0.0.2", master_port=port, cluster_key="k" * 32)


OWN_CLASS = """
from models.families.decoders.llama import LlamaForCausalLM

class OwnModel(LlamaForCausalLM): ...
"""


def test_ranks_run_a_class_that_the_program_has_registered(
    config: EngineConfig, alone: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class is in a module beside the program, and its name looks like an encoder's."""
    (tmp_path / "module_beside_the_program.py").write_text(OWN_CLASS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "_classes", {})
    register_model("OwnModel", import_module("module_beside_the_program").OwnModel)
    own = replace(config, hf_overrides={"architectures": ["OwnModel"]})
    assert_equal(answers(replace(own, tensor_parallel_size=2)), alone)


def test_ranks_cannot_run_a_class_of_a_function(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OwnModel(LlamaForCausalLM): ...

    monkeypatch.setattr(plugins, "_classes", {})
    register_model("OwnModel", OwnModel)
    own = replace(config, hf_overrides={"architectures": ["OwnModel"]}, distributed_executor_backend="mp")
    with pytest.raises(ExecutorDead, match="which other processes cannot import: define it"):
        answers(own)


@pytest.fixture
def node() -> Iterator[Callable[[EngineConfig], None]]:
    """A function that starts the node of the second machine."""
    code = (
        "import sys, msgspec\n"
        "from engine_core.config import EngineConfig\n"
        "from engine_core.ranks.node_process import run_node\n"
        "sys.exit(run_node(msgspec.json.decode(sys.argv[1], type=EngineConfig), 'warning'))"
    )
    started: list[subprocess.Popen[bytes]] = []

    def start(config: EngineConfig) -> None:
        options = msgspec.json.encode(replace(config, node_rank=1)).decode()
        started.append(subprocess.Popen([sys.executable, "-P", "-c", code, options]))

    yield start
    for process in started:
        assert process.wait(60) in (0, CANNOT_START), "it ends when its engine does"
