"""A worker writes the same answers with any guesses as token by token, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_drafts import Writer, Written, alone, hidden_of, partly_right, write
from hypothesis import given, settings
from hypothesis import strategies as st
from opened import open_runner
from tiny import ARCHITECTURES, VOCAB_SIZE, tiny_checkpoint
from tiny_shapes import SHARED_CACHES

from models import registry
from worker.features.speculation.draft_rows import give_rows
from worker.kernels.cpu import operations, torch_operations
from worker.protocol import NewSeq, Pooling, Sampling, SeqStep, StepInput, StepOutput
from worker.runner import Runner
from worker.steps.compute import Compute
from worker.steps.output import NOT_FINITE

SIZES: dict[str, Any] = {
    "max_num_seqs": 6,
    "block_size": 4,
    "num_gpu_blocks_override": 96,
    "max_model_len": 64,
}
PROMPTS = [[5, 17, 40, 99, 250, 31, 8], [300], [11, 12, 13, 11, 12, 13, 11, 12, 13, 7, 200, 4, 90]]
OUTPUT = 12
PLANS = st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4)), min_size=1, max_size=6
)
"""In turns, how many right guesses are made, and the others behind them, which may hold by chance."""

Asked = list[tuple[list[int], Sampling]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), head_dim=16)


def greedy(**options: Any) -> Sampling:
    return Sampling(**{"max_tokens": OUTPUT, "temperature": 0, **options})


def each_option(runner: Runner) -> dict[str, Asked]:
    """Prompts under every option, some of which depend on what is written without it."""
    free = [each.output for each in alone(runner, [(prompt, greedy()) for prompt in PROMPTS])]
    drawn = {"temperature": 1.3, "seed": 7}
    usual: dict[str, dict[str, Any]] = {
        "greedy": {"logprobs": None},
        "the token's logprob": {"logprobs": 0},
        "all logprobs": {"logprobs": -1, "prompt_logprobs": 1},
        "drawn": drawn,
        "top_p": {**drawn, "top_p": 0.9},
        "top_k, min_p": {**drawn, "top_k": 20, "min_p": 0.02},
        "typical_p, top_n_sigma": {**drawn, "typical_p": 0.8, "top_n_sigma": 2.0},
        "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.7, **drawn},
        "allowed tokens": {"allowed_token_ids": tuple(range(3, 300, 11))},
        "processed logprobs": {**drawn, "top_k": 20, "top_p": 0.9, "logprobs_mode": "processed_logprobs"},
        "some of each": {**drawn, "top_p": 0.95, "repetition_penalty": 1.2, "logit_bias": {9: 2.0}},
    }
    own = {
        "bad words": [{"bad_words": ((a, b), (c, d, e), (f,))} for a, b, c, d, e, f, *_ in free],
        "stop ids": [{"min_tokens": 6, "stop_token_ids": tuple(each[:4])} for each in free],
        "logit bias": [{"logit_bias": {each[0]: -9.0, each[4]: -2.0, 77: 1.5}} for each in free],
    }
    asked = {name: [options] * len(PROMPTS) for name, options in usual.items()} | own
    return {
        name: [
            (prompt, greedy(**{"logprobs": 3, **given}))
            for prompt, given in zip(PROMPTS, options, strict=True)
        ]
        for name, options in asked.items()
    }


@dataclass
class Subject:
    runner: Runner
    asked: dict[str, Asked]
    truth: dict[str, list[Written]]

    @classmethod
    def open(cls, folder: Path, **options: Any) -> Subject:
        runner = open_runner(folder, **SIZES, **options)
        asked = each_option(runner)
        return cls(runner, asked, {name: alone(runner, each) for name, each in asked.items()})


KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "cpu_threads": 2},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


@pytest.fixture(scope="module", params=KINDS)
def subject(request: pytest.FixtureRequest, llama: Path) -> Iterator[Subject]:
    subject = Subject.open(llama, **KINDS[request.param])
    yield subject
    subject.runner.close()


def assert_same(found: Sequence[Written], truth: Sequence[Written]) -> None:
    """Compare tokens, logprobs and hidden states, by their bits."""
    for one, other in zip(found, truth, strict=True):
        assert one.answer == other.answer


@pytest.mark.parametrize("replayed", [True, False], ids=["replayed", "not replayed"])
def test_every_option(subject: Subject, replayed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses of all rows are right, partly right and wrong, in steps of several sequences."""
    runner = subject.runner
    compute = runner._compute
    assert isinstance(compute, Compute)
    assert compute.forward != runner._model.forward, "small steps are replayed"
    if not replayed:
        monkeypatch.setattr(compute, "forward", runner._model.forward)
    plans = [[(2, [11, 12]), (0, []), (1, [40, 250, 3]), (8, [])]]
    plans += [[(4, [])], [(0, [9, 9, 9])]] if replayed else []
    for name, asked in subject.asked.items():
        for seed, plan in enumerate(plans):
            assert_same(
                write(runner, asked, partly_right(subject.truth[name], plan), seed), subject.truth[name]
            )


@settings(max_examples=25, deadline=None)
@given(plan=PLANS, name=st.integers(0, 13), first=st.integers(0, 2), count=st.integers(1, 3))
def test_any_guesses(
    subject: Subject, plan: list[tuple[int, list[int]]], name: int, first: int, count: int
) -> None:
    option = list(subject.asked)[name]
    asked, truth = (each[option][first : first + count] for each in (subject.asked, subject.truth))
    assert_same(write(subject.runner, asked, partly_right(truth, plan)), truth)


def test_steps_are_fewer_by_what_holds(subject: Subject) -> None:
    truth = subject.truth["some of each"][:1]
    for right, steps in ((0, 12), (1, 6), (3, 3), (20, 1)):
        writer = Writer.of(subject.runner)
        writer.write([Written(*subject.asked["some of each"][0])], partly_right(truth, [(right, [])]))
        assert writer.steps == steps


@pytest.fixture
def plain(llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """A runner for which torch computes alone."""
    monkeypatch.setattr(operations, "choose_kernels", lambda: (None, torch_operations.TABLE))
    runner = open_runner(llama, **SIZES, dtype="float32")
    yield runner
    runner.close()


def test_without_kernels_tokens_are_the_same_and_logprobs_nearly(plain: Runner) -> None:
    """The products of torch differ in the last digits by the number of rows."""
    for name, asked in each_option(plain).items():
        truth = alone(plain, asked)
        found = write(plain, asked, partly_right(truth, [(3, [5]), (0, [8, 8]), (1, [])]))
        for one, other in zip(found, truth, strict=True):
            assert one.output == other.output, name
            for entry, right in zip(one.logprobs, other.logprobs, strict=True):
                assert entry.ids[:2] == right.ids[:2]
                assert entry.values == pytest.approx(right.values, abs=1e-4)


SHAPES: dict[str, dict[str, Any]] = {"Gemma4ForCausalLM": SHARED_CACHES}
DAILY = ["Gemma2ForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM", "MixtralForCausalLM"]
"""Windows with soft caps and with sinks, latent attention, and experts."""
WITH_STATES = ["Qwen3_5ForCausalLM", "Lfm2ForCausalLM", "BambaForCausalLM", "KimiLinearForCausalLM"]
WITH_STATES += ["FalconMambaForCausalLM"]
OTHERS = sorted({*ARCHITECTURES} - {*DAILY, *WITH_STATES} & {*registry.ARCHITECTURES})


def compare(architecture: str, folder: Path, **options: Any) -> None:
    """Compare steps with guesses of a tiny model of this class with single tokens."""
    tiny_checkpoint(architecture, folder, **SHAPES.get(architecture, {}))
    runner = open_runner(folder, **SIZES, **options, guesses=True)
    asked = [(prompt, greedy(logprobs=2, repetition_penalty=1.1)) for prompt in PROMPTS]
    truth = alone(runner, asked)
    for plan in ([(5, [])], [(2, [7, 8, 9]), (0, [3, 4])]):
        assert_same(write(runner, asked, partly_right(truth, plan)), truth)
    runner.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("architecture", DAILY + WITH_STATES)
def test_kinds_of_models(architecture: str, dtype: str, tmp_path: Path) -> None:
    compare(architecture, tmp_path, dtype=dtype)


@pytest.mark.parametrize("architecture", OTHERS)
def test_all_other_models(architecture: str, tmp_path: Path) -> None:
    compare(architecture, tmp_path, dtype="bfloat16")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("Qwen3_5ForCausalLM", tmp_path_factory.mktemp("hybrid"))


@pytest.mark.parametrize("replayed", [True, False], ids=["replayed", "not replayed"])
def test_every_option_of_a_hybrid(hybrid: Path, replayed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = open_runner(hybrid, **SIZES, dtype="bfloat16", cpu_threads=2, guesses=True)
    compute, plan = runner._compute, [(2, [11, 12]), (0, []), (1, [40, 250, 3]), (8, [])]
    assert isinstance(compute, Compute)
    assert compute.forward != runner._model.forward, "small steps are replayed"
    if not replayed:
        monkeypatch.setattr(compute, "forward", runner._model.forward)
    for asked in each_option(runner).values():
        truth = alone(runner, asked)
        assert_same(write(runner, asked, partly_right(truth, plan)), truth)
    runner.close()


def test_encoders_take_no_guesses_nor_do_states_unless_asked(llama: Path, tmp_path: Path) -> None:
    assert open_runner(llama, **SIZES).facts.most_rows == 64
    assert open_runner(llama, **{**SIZES, "max_num_batched_tokens": 20}).facts.most_rows == 20
    assert open_runner(llama, **{**SIZES, "max_num_seqs": 70}).facts.most_rows == 70
    assert open_runner(llama, **SIZES, tasks=("embed",)).facts.most_rows == 0
    runner = open_runner(tiny_checkpoint("MambaForCausalLM", tmp_path), **SIZES)
    assert runner.facts.most_rows == 0
    new = NewSeq(0, [5, 6], 2, greedy())
    with pytest.raises(ValueError, match="nothing can be guessed behind"):
        runner.launch(StepInput(1, [new], [SeqStep(0, 0, 2, [0], True, guesses=[7])]))


def test_a_row_that_is_not_finite_counts_only_behind_guesses_that_hold(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_runner(llama, **SIZES)
    (truth,) = alone(runner, [(PROMPTS[0], greedy(logprobs=1))])
    healthy = runner._model.logits

    def run(guesses: list[int]) -> StepOutput:
        new = NewSeq(0, PROMPTS[0], 7, greedy(logprobs=1))
        return runner.launch(
            StepInput(1, [new], [SeqStep(0, 0, 7, [0, 1, 2], True, guesses=guesses)], fresh=True)
        ).result()

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = healthy(hidden)
        logits[2] = torch.nan
        return logits

    monkeypatch.setattr(runner._model, "logits", broken)
    right, wrong = truth.output[:3], [truth.output[0], (truth.output[1] + 1) % VOCAB_SIZE, 5]
    output = run(right)
    assert (output.tokens, output.held, output.failed) == ([-1], {0: right[:2]}, {0: NOT_FINITE})
    output = run(wrong)
    assert (output.tokens, output.held, output.failed) == ([truth.output[1]], {0: wrong[:1]}, {})
    assert output.held_logprobs == {0: truth.logprobs[:1]}
    assert output.logprobs == truth.logprobs[1:2]


def test_prompts_and_texts_beside_guesses(llama: Path) -> None:
    """A prompt may have guesses behind its last token; steps may read and pool others at the same time."""
    runner = open_runner(llama, **SIZES)
    asked = [(prompt, greedy(logprobs=2, prompt_logprobs=1)) for prompt in PROMPTS]
    truth = alone(runner, asked)
    new = [NewSeq(slot, prompt, len(prompt), params) for slot, (prompt, params) in enumerate(asked)]
    new.append(NewSeq(3, PROMPTS[2], 13, Pooling(task="embed")))
    text = SeqStep(3, 0, 13, [20, 21, 22, 23], samples=False, pools=True)
    vectors = runner.launch(StepInput(1, new[3:], [text], fresh=True)).result().pooled
    rows = [
        SeqStep(0, 0, 7, [0, 1, 2], True, guesses=truth[0].output[:3]),
        text,
        SeqStep(1, 0, 1, [3], True, guesses=[*truth[1].output[:2], 9]),
        SeqStep(2, 0, 13, [5, 6, 7, 8], True),
    ]
    with hidden_of(runner) as hidden:
        output = runner.launch(StepInput(2, new, rows, fresh=True)).result()
    assert output.tokens == [truth[0].output[3], -1, truth[1].output[2], truth[2].output[0]]
    assert output.held == {0: truth[0].output[:3], 1: truth[1].output[:2]}
    assert output.held_logprobs == {0: truth[0].logprobs[:3], 1: truth[1].logprobs[:2]}
    assert output.logprobs == [truth[0].logprobs[3], None, truth[1].logprobs[2], truth[2].logprobs[0]]
    assert {slot: len(entries) for slot, entries in output.prompt_logprobs.items()} == {0: 6, 2: 12}
    assert output.pooled == vectors
    states = [row.numpy().tobytes() for row in hidden[0]]
    assert states[6:10] == truth[0].hidden[:4]
    assert states[23:26] == truth[1].hidden[:3]


GUESSES = [9, 8]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (SeqStep(0, 2, 1, [2, 3], False, guesses=GUESSES), "nothing can be guessed behind"),
        (SeqStep(0, 2, 1, [2, 3], False, pools=True, guesses=GUESSES), "nothing can be guessed behind"),
        (SeqStep(0, 2, 1, [], True, guesses=GUESSES), "does not fit"),
        (SeqStep(0, 2, 0, [2, 3], True, guesses=GUESSES), "does not fit"),
        (SeqStep(0, 2, 1, list(range(2, 17)), True, guesses=[9] * 62), "does not fit"),
    ],
    ids=["does not sample", "pools", "no block", "no token", "too long"],
)
def test_contradictions_are_refused_before_anything_is_written(
    llama: Path, wrong: SeqStep, message: str
) -> None:
    runner = open_runner(llama, **SIZES)
    read = SeqStep(0, 0, 2, [1], True)
    runner.launch(StepInput(1, [NewSeq(0, [5, 6], 2, greedy())], [read])).result()
    slots = runner._slots
    before = slots.words.clone(), list(slots.blocks)
    with pytest.raises(ValueError, match=message):
        runner.launch(StepInput(2, [], [wrong]))
    assert torch.equal(slots.words, before[0])
    assert slots.blocks == before[1]


def test_rows_have_positions_and_numbers_of_their_own() -> None:
    seqs = [SeqStep(1, 4, 1, [7], True, 2, guesses=[8, 9]), SeqStep(0, 9, 3, [], False)]
    seqs.append(SeqStep(2, 4, 1, [], True, 7, bound=True, guesses=[3]))
    assert give_rows(StepInput(3, [], seqs)).seqs == [
        SeqStep(1, 4, 1, [7], True, 2),
        SeqStep(1, 5, 1, [], True, 3),
        SeqStep(1, 6, 1, [], True, 4),
        SeqStep(0, 9, 3, [], False),
        SeqStep(2, 4, 1, [], True, 7, bound=True),
        SeqStep(2, 5, 1, [], True, 8, bound=True),
    ]
    plain = StepInput(3, [], seqs[1:2])
    assert give_rows(plain) == plain
