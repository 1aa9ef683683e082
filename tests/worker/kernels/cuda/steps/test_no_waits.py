"""Steps on CUDA send one copy and wait for nothing: all families, options of sampling, and ways to pool.

The card here is torch's "meta" device, whose tensors have no values: to read one is an error. Kernels are
taken, not started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interpreted_device import ON_A_CARD
from meta_cuda import Counted, MetaCuda, opened
from meta_device import Meta, NoMixing
from packed import Recipe, change_config, write_pair
from sizes import worker_config
from tiny import ARCHITECTURES, REPLAYED_ENCODERS, tiny_checkpoint
from torch import Tensor
from toy_language import bound_of

from models.config import read_config
from models.conversion.conversion_choice import resolve_conversion
from models.pooling.config import read_pooling
from worker.config import WorkerConfig
from worker.kernels.cuda.compiling.model_variants import Unsupported, compiling, model_calls
from worker.protocol import NewSeq, Pooling, Sampling, SeqStep, StepBounds, StepInput
from worker.runner import Runner
from worker.sampling import token_bounds as bounds
from worker.sampling.top_k_top_p import draw_fully

LENGTH, CHUNK, BLOCK = 6, 4, 4
MOST_TOKENS = 32
"""The tokens of the largest graph."""
WAITING = "JetMoeForCausalLM"
"""A family that runs on transformers' code, which asks the device how many tokens each expert has."""
CPU_ONLY = (
    *("DeepseekV32ForCausalLM", "FalconMambaForCausalLM", "GlmMoeDsaForCausalLM", "JambaForCausalLM"),
    *("KimiLinearForCausalLM", "MambaForCausalLM"),
)
"""Families that are refused on cards so far."""
GREEDY = Sampling(max_tokens=9, temperature=0)

pytestmark = pytest.mark.skipif(ON_A_CARD, reason="tensors of no device are not tensors of a card")


def config_of(
    folder: Path, runner: str = "auto", pooler: dict[str, object] | None = None, **options: Any
) -> WorkerConfig:
    model = read_config(folder)
    return worker_config(
        folder=str(folder),
        model=model,
        conversion=resolve_conversion(model, folder, runner=runner),
        pooling=read_pooling(folder, model, pooler or {}),
        **{
            "dtype": "bfloat16",
            "load_format": "dummy",
            "max_num_seqs": 5,
            "block_size": BLOCK,
            "max_model_len": 64,
            "num_gpu_blocks_override": 80,
            "cpu_threads": 1,
            **options,
        },
    )


def take(runner: Runner, step: StepInput, following: Any = None) -> Counted:
    with Counted() as counted:
        runner.launch(step, *([] if following is None else [following]))
    assert counted.sent == 1
    return counted


def read_and_decode(runner: Runner, params: Sequence[Sampling], first: int, following: Any = None) -> None:
    """Prompts in two chunks, of which the last one comes beside decoding rows; then all rows decode."""
    slots = range(first, first + len(params))
    new = [NewSeq(slot, [5] * LENGTH, LENGTH, each) for slot, each in zip(slots, params, strict=True)]
    *early, last = slots
    bound = following is not None

    def chunk(slot: int, at: int) -> SeqStep:
        blocks, ends = [2 * slot + (at > 0)], at > 0
        return SeqStep(slot, at, LENGTH - CHUNK if ends else CHUNK, blocks, ends, bound=ends and bound)

    def token(slot: int, index: int) -> SeqStep:
        return SeqStep(slot, LENGTH - 1 + index, 1, [], True, index, bound=bound)

    take(runner, StepInput(1, new, [chunk(slot, 0) for slot in slots]))
    if early:
        take(runner, StepInput(2, [], [chunk(slot, CHUNK) for slot in early]), following)
    take(
        runner,
        StepInput(3, [], [*(token(slot, 1) for slot in early), chunk(last, CHUNK)]),
        following,
    )
    decoding = [token(slot, 2 - (slot == last)) for slot in slots]
    take(runner, StepInput(4, [], decoding), following)


def generates_without_waiting(config: WorkerConfig) -> None:
    """Steps as they come, and then the same ones as graphs."""
    with opened(config, MetaCuda()) as (runner, calls):
        read_and_decode(runner, [GREEDY, GREEDY], first=0)
        assert {"attend", "attend_latent", "scan"} & {call.kernel.fn.__name__ for call in calls}
    device = MetaCuda(MOST_TOKENS)
    with opened(config, device) as (runner, _):
        while runner.prepare():
            pass
        read_and_decode(runner, [GREEDY, GREEDY], first=0)
    assert device.replays == 4, "every step is a graph"


@pytest.mark.parametrize("architecture", [each for each in ARCHITECTURES if each not in (WAITING, *CPU_ONLY)])
def test_decoders_wait_for_nothing(architecture: str, tmp_path: Path) -> None:
    generates_without_waiting(config_of(tiny_checkpoint(architecture, tmp_path)))


@pytest.mark.parametrize("architecture", CPU_ONLY)
def test_what_has_no_kernels_is_refused_before_weights_are_read(architecture: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(architecture, tmp_path)
    calls = partial(model_calls, read_config(folder), folder, torch.float32, 90)
    refused = pytest.raises(Unsupported, match="runs on CPUs only so far: there are no kernels")
    with refused, compiling(calls, None):
        pytest.fail("weights would be read")


def test_what_waits_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        generates_without_waiting(config_of(tiny_checkpoint(WAITING, tmp_path)))


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(method="gptq", group=32, act_order=True),
        Recipe(method="gptq", group=32, bits=8),
        Recipe(method="awq", group=32, symmetric=False),
        Recipe(method="pack-quantized", group=32, scales=torch.bfloat16),
        Recipe(method="int-quantized", bits=8, scales=torch.float32),
    ],
    ids=str,
)
def test_quantized_decoders_wait_for_nothing(recipe: Recipe, tmp_path: Path) -> None:
    folder = write_pair(tmp_path, recipe, hidden_size=64, intermediate_size=96, num_hidden_layers=1).packed
    generates_without_waiting(config_of(folder))


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_fp8_decoders_wait_for_nothing(architecture: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(architecture, tmp_path, hidden_size=128, intermediate_size=128)
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    change_config(folder, quantization_config=blocks)
    generates_without_waiting(config_of(folder))


SAMPLINGS = {
    "greedy": GREEDY,
    "plain": Sampling(max_tokens=9),
    "seeded": Sampling(max_tokens=9, temperature=0.3, seed=5),
    "top_p": Sampling(max_tokens=9, top_p=0.5),
    "top_k": Sampling(max_tokens=9, top_k=5, top_p=0.9),
    "min_p": Sampling(max_tokens=9, min_p=0.1),
    "logprobs": Sampling(max_tokens=9, logprobs=3),
    "logprobs of the greedy": Sampling(max_tokens=9, temperature=0, logprobs=0),
    "all logprobs": Sampling(max_tokens=9, logprobs=-1),
    "prompt logprobs": Sampling(max_tokens=9, prompt_logprobs=2),
    "typical_p": Sampling(max_tokens=9, typical_p=0.5),
    "top_n_sigma": Sampling(max_tokens=9, top_n_sigma=1.0),
    "presence": Sampling(max_tokens=9, presence_penalty=0.5),
    "frequency": Sampling(max_tokens=9, frequency_penalty=0.3),
    "repetition": Sampling(max_tokens=9, repetition_penalty=1.2),
    "bias": Sampling(max_tokens=9, logit_bias={3: 1.0}),
    "bad words": Sampling(max_tokens=9, bad_words=((3,), (4, 5))),
    "min_tokens": Sampling(max_tokens=9, min_tokens=3, stop_token_ids=(1,)),
    "allowed": Sampling(max_tokens=9, allowed_token_ids=(3, 4, 5)),
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("Qwen3ForCausalLM", tmp_path_factory.mktemp("qwen3"), num_hidden_layers=1)


@pytest.mark.parametrize(("graphs", "draws"), [(False, True), (True, True), (False, False)])
def test_sampling_waits_for_nothing(qwen: Path, graphs: bool, draws: bool) -> None:
    """Each option alone, and all of them in one step; where the kernel draws wrong, torch draws."""
    device = MetaCuda(MOST_TOKENS if graphs else 0)
    device.draw = device.draw if draws else draw_fully
    with opened(config_of(qwen, max_num_seqs=len(SAMPLINGS)), device) as (runner, _):
        while runner.prepare():
            pass
        for params in SAMPLINGS.values():
            read_and_decode(runner, [params, params], first=0)
        read_and_decode(runner, [*SAMPLINGS.values()], first=0)
    assert bool(device.replays) is graphs


@pytest.mark.parametrize("graphs", [False, True])
def test_bounds_wait_for_nothing_but_themselves(
    qwen: Path, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may be sampled follows the step, from pinned memory: rows, and their bits."""
    moved: list[np.ndarray] = []

    def move(values: np.ndarray, target: torch.device) -> Tensor:
        moved.append(values)
        return torch.empty(values.shape, dtype=torch.from_numpy(values).dtype, device=target)

    monkeypatch.setattr(bounds, "_move", move)
    number = iter((2, 3, 4))
    allowed = bound_of([3, 4], 320, "allowed")

    def following() -> StepBounds:
        at = next(number)
        return StepBounds(at, {0: allowed, **({1: None} if at > 2 else {})})

    with opened(config_of(qwen), MetaCuda(MOST_TOKENS if graphs else 0)) as (runner, _):
        while runner.prepare():
            pass
        read_and_decode(runner, [GREEDY, Sampling(max_tokens=9)], 0, following)
    assert [values.tolist() for values in moved[::2]] == [[0]] * 3


def pools_without_waiting(config: WorkerConfig, asked: Sequence[Pooling], chunk: int = LENGTH) -> None:
    """Texts in chunks, as they come and as graphs, which pool in their last step."""
    for device in (MetaCuda(), MetaCuda(MOST_TOKENS)):
        with opened(config, device) as (runner, _):
            while runner.prepare():
                pass
            paged, steps = runner.facts.causal, 0
            new = [NewSeq(slot, [5, 9] * 3, LENGTH, params) for slot, params in enumerate(asked)]
            for number, start in enumerate(range(0, LENGTH, chunk)):
                blocks = range(start // BLOCK, -(-min(LENGTH, start + chunk) // BLOCK)) if paged else ()
                seqs = [
                    SeqStep(
                        slot,
                        start,
                        min(chunk, LENGTH - start),
                        [2 * slot + block for block in blocks],
                        samples=False,
                        pools=start + chunk >= LENGTH,
                    )
                    for slot in range(len(asked))
                ]
                take(runner, StepInput(number, [] if number else new, seqs))
                steps += 1
        assert device.replays == (steps if device.most_tokens else 0)


EMBEDDINGS = [
    Pooling(task="embed"),
    Pooling(task="embed", dimensions=4),
    Pooling(task="embed", use_activation=False, skip=2),
    Pooling(task="embed", second_at=3),
]
TOKENS = [
    Pooling(task="token_embed"),
    Pooling(task="token_embed", dimensions=4, use_activation=False),
    Pooling(task="token_embed", late_query="q"),
    Pooling(task="token_embed", late_document="q"),
]
LABELS = [
    Pooling(task="classify"),
    Pooling(task="classify", use_activation=False),
    Pooling(task="classify", second_at=3),
]
TOKEN_LABELS = [Pooling(task="token_classify"), Pooling(task="token_classify", use_activation=False)]


@pytest.mark.parametrize("family", REPLAYED_ENCODERS)
def test_encoders_wait_for_nothing(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(f"{family}Model", tmp_path / "vectors")
    pools_without_waiting(config_of(folder), [*EMBEDDINGS, *TOKENS[:1]])
    folder = tiny_checkpoint(f"{family}ForSequenceClassification", tmp_path / "scores")
    pools_without_waiting(config_of(folder), LABELS)
    folder = tiny_checkpoint(f"{family}ForTokenClassification", tmp_path / "labels")
    pools_without_waiting(config_of(folder), TOKEN_LABELS)


@pytest.mark.parametrize("architecture", ["BertModel", "BertForSequenceClassification"])
def test_many_texts_are_pooled_by_as_many_operations_as_two(tmp_path: Path, architecture: str) -> None:
    config = config_of(tiny_checkpoint(architecture, tmp_path), max_num_seqs=40)
    asked = Pooling(task="embed" if architecture == "BertModel" else "classify")
    with opened(config, MetaCuda()) as (runner, calls):
        found: list[tuple[int, int]] = []
        for texts in (2, 40):
            del calls[:]
            new = [NewSeq(slot, [5, 9, 5], 3, asked) for slot in range(texts)]
            seqs = [SeqStep(slot, 0, 3, [], samples=False, pools=True) for slot in range(texts)]
            found.append((len(take(runner, StepInput(1, new, seqs)).operations), len(calls)))
    assert found[0] == found[1]


@pytest.mark.parametrize("chunk", [LENGTH, 4])
@pytest.mark.parametrize("mode", ["LAST", "CLS", "MEAN", "MAX", "MEAN_SQRT_LEN", "WEIGHTED_MEAN"])
def test_pooling_waits_for_nothing(qwen: Path, mode: str, chunk: int) -> None:
    config = config_of(qwen, "pooling", {"pooling_type": mode})
    pools_without_waiting(config, [*EMBEDDINGS, *TOKENS][:4], chunk)


@pytest.mark.parametrize("chunk", [LENGTH, 4])
def test_step_pooling_waits_for_nothing(tmp_path: Path, chunk: int) -> None:
    """The host has the tokens, and so it knows which rows are answered."""
    folder = tiny_checkpoint("Qwen2ForCausalLM", tmp_path, tie_word_embeddings=False)
    change_config(folder, architectures=["Qwen2ForProcessRewardModel"])
    pools_without_waiting(config_of(folder, pooler={"step_tag_id": 9}), TOKEN_LABELS, chunk)


@pytest.mark.parametrize("architecture", ["Qwen2ForRewardModel", "Qwen2ForSequenceClassification"])
def test_rewards_and_scores_wait_for_nothing(tmp_path: Path, architecture: str) -> None:
    folder = tiny_checkpoint("Qwen2ForCausalLM", tmp_path, tie_word_embeddings=False)
    change_config(folder, architectures=[architecture])
    scores = "Classification" in architecture
    pools_without_waiting(config_of(folder), LABELS[:2] if scores else TOKEN_LABELS)


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
def test_what_waits_is_noticed_by_the_device(
    mistake: Callable[[Tensor], object], error: type[Exception], said: str
) -> None:
    table = torch.zeros(4, 4, dtype=torch.int32, device=Meta.target)
    with NoMixing(), pytest.raises(error, match=said):
        mistake(table)
