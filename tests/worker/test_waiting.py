"""A step is launched without a look at its tensors: on a GPU each would wait for all that is under way.

The device here is torch's "meta", whose tensors have shapes and no values: to read one is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from meta_device import Meta, NoMixing
from opened import open_runner
from tiny import tiny_checkpoint
from torch import Tensor

from models import ops
from models.ops import reference
from worker import runner as runner_module
from worker.protocol import NewSeq, Pooling, Sampling, SeqStep, StepInput
from worker.runner import Runner

LENGTH = 7


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    folder = tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))
    sizes = {"max_num_seqs": 20, "block_size": 4, "max_model_len": 64, "num_gpu_blocks_override": 80}
    tasks = ("generate", "embed", "token_embed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module, "open_device", lambda _: Meta())
        for name in ops.SPECIFIED:
            if hasattr(reference, name):  # a test before may have bound those of the CPU
                patch.setattr(ops, name, getattr(reference, name))
        patch.setattr(Runner, "_warm_up", lambda _: None)  # it reads results, and there are none
        yield open_runner(folder, tasks=tasks, dtype="bfloat16", **sizes)


def launch(runner: Runner, *params: Sampling | Pooling) -> None:
    """Read prompts in two chunks; then, where there is generation, a token more."""
    new = [NewSeq(slot, [5] * LENGTH, LENGTH, each) for slot, each in enumerate(params)]
    generates = [isinstance(each, Sampling) for each in params]
    first = [SeqStep(slot, 0, 4, [2 * slot], False) for slot in range(len(params))]
    second = [
        SeqStep(slot, 4, LENGTH - 4, [2 * slot + 1], samples, 0, not samples)
        for slot, samples in enumerate(generates)
    ]
    third = [SeqStep(slot, LENGTH, 1, [], True, 1) for slot, samples in enumerate(generates) if samples]
    with NoMixing():
        runner.launch(StepInput(1, new, first))
        runner.launch(StepInput(2, [], second))
        if third:
            runner.launch(StepInput(3, [], third))


SAMPLINGS = {
    "greedy": Sampling(max_tokens=9, temperature=0),
    "plain": Sampling(max_tokens=9),
    "top_p": Sampling(max_tokens=9, top_p=0.5),
    "top_k": Sampling(max_tokens=9, top_k=5, top_p=0.9),
    "min_p": Sampling(max_tokens=9, min_p=0.1),
    "logprobs": Sampling(max_tokens=9, logprobs=3),
    "all logprobs": Sampling(max_tokens=9, logprobs=-1),
    "prompt logprobs": Sampling(max_tokens=9, prompt_logprobs=2),
    "penalties": Sampling(max_tokens=9, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2),
    "bias": Sampling(max_tokens=9, logit_bias={3: 1.0}),
    "bad words": Sampling(max_tokens=9, bad_words=((3,), (4, 5))),
    "min_tokens": Sampling(max_tokens=9, min_tokens=3, stop_token_ids=(1,)),
    "allowed": Sampling(max_tokens=9, allowed_token_ids=(3, 4, 5)),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampling_waits_for_nothing(runner: Runner, name: str) -> None:
    launch(runner, SAMPLINGS[name])


def test_all_kinds_of_rows_in_one_step_wait_for_nothing(runner: Runner) -> None:
    launch(
        runner,
        *SAMPLINGS.values(),
        Pooling(task="embed", dimensions=4),
        Pooling(task="token_embed"),
        Pooling(task="token_embed", late_query="q"),
        Pooling(task="token_embed", late_document="q"),
    )


@pytest.mark.parametrize(
    ("mistake", "error", "said"),
    [
        (lambda table: table[[0, 1]], AssertionError, "an index of Python's numbers"),
        (lambda table: torch.tensor([1], device=table.device), AssertionError, "copies numbers"),
        (lambda table: table[torch.tensor([0, 1])], AssertionError, r"index\.Tensor works on"),
        (lambda table: table[0].to("cpu"), AssertionError, r"_to_copy\.default works on"),
        (lambda table: torch.ones(4).to(table.device), AssertionError, r"_to_copy\.default copies between"),
        (lambda table: table[0, 0].item(), RuntimeError, r"item\(\) cannot be called on meta"),
        (lambda table: table[0].nonzero(), NotImplementedError, r"torch\.nonzero\(\) raises unimplemented"),
    ],
    ids=[
        "list as an index",
        "list as a tensor",
        "index on the host",
        "to the host",
        "to the device",
        "one number",
        "size that values decide",
    ],
)
def test_these_tests_would_notice(
    mistake: Callable[[Tensor], object], error: type[Exception], said: str
) -> None:
    table = torch.zeros(4, 4, dtype=torch.int32, device=Meta.target)
    with NoMixing(), pytest.raises(error, match=said):
        mistake(table)
