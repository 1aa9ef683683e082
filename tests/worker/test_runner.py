"""The runner on a tiny Llama gives Hugging Face's tokens, however steps are cut and however far ahead."""

from __future__ import annotations

import random
import shutil
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from opened import open_runner
from safetensors.torch import load_file, save_file
from tiny import EOS_ID, VOCAB_SIZE, hf_greedy, hf_logits, tiny_checkpoint

from worker.protocol import NewSeq, Sampling, SeqStep, StepInput, StepOutput, TokenLogprobs
from worker.runner import Runner
from worker.steps.output import NOT_FINITE, StepHandle

BLOCK = 4
PROMPTS = [[5, 17, 40, 99, 250, 31, 8], [300], [11, 12, 13, 11, 12, 13, 11, 12, 13, 7, 200, 4, 90]]
OUTPUT = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


SIZES = {"max_num_seqs": 6, "block_size": BLOCK, "num_gpu_blocks_override": 64, "max_model_len": 64}


def open_small(folder: Path, **given: object) -> Runner:
    return open_runner(folder, **{**SIZES, **given})


@pytest.fixture(scope="module")
def runner(folder: Path) -> Runner:
    return open_small(folder)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return hf_greedy(folder, PROMPTS, OUTPUT)


@dataclass
class Live:
    """A sequence as an engine sees it: counts first, tokens when they arrive."""

    prompt: list[int]
    params: Sampling
    slot: int
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    computed: int = 0
    planned: int = 0  # tokens sampled or about to be
    blocks: int = 0
    entered: bool = False

    @property
    def known(self) -> int:
        return len(self.prompt) + self.planned

    @property
    def done(self) -> bool:
        return self.planned >= self.params.max_tokens and self.computed >= self.known - 1


class Engine:
    """A minimal engine: up to `chunk` tokens of each live sequence in a step; blocks are never freed."""

    def __init__(self, runner: Runner, chunk: int, ahead: int) -> None:
        self.runner, self.chunk, self.ahead = runner, chunk, ahead
        self.free = list(range(runner.facts.num_blocks))
        random.Random(0).shuffle(self.free)
        self.flying: deque[tuple[list[tuple[Live, bool]], StepHandle]] = deque()

    def plan(self, live: list[Live]) -> None:
        new, seqs, rows = [], [], []
        for each in live:
            if each.done:
                continue
            if not each.entered:
                new.append(NewSeq(each.slot, each.prompt + each.output, len(each.prompt), each.params))
                each.entered = True
            count = min(self.chunk, each.known - each.computed)
            end = each.computed + count
            gained = -(-end // BLOCK) - each.blocks
            samples = end == each.known
            blocks = [self.free.pop() for _ in range(gained)]
            seqs.append(SeqStep(each.slot, each.computed, count, blocks, samples, each.planned))
            each.blocks += gained
            each.computed = end
            each.planned += samples
            rows.append((each, samples))
        self.flying.append((rows, self.runner.launch(StepInput(number=1, new=new, seqs=seqs))))

    def land(self) -> StepOutput:
        rows, handle = self.flying.popleft()
        answer = handle.result()
        for index, (each, samples) in enumerate(rows):
            each.prompt_logprobs += answer.prompt_logprobs.get(each.slot, [])
            if samples:
                each.output.append(answer.tokens[index])
                each.logprobs.append(answer.logprobs[index] if answer.logprobs else None)
            else:
                assert answer.tokens[index] == -1
        return answer

    def run(self, live: list[Live]) -> None:
        while self.flying or not all(each.done for each in live):
            if not all(each.done for each in live):
                self.plan(live)
            if len(self.flying) > self.ahead or all(each.done for each in live):
                self.land()

    def preempt(self, each: Live) -> None:
        """Take a sequence's slot away. None of its steps may be in flight."""
        each.entered, each.computed, each.blocks, each.planned = False, 0, 0, len(each.output)


def greedy(**given: object) -> Sampling:
    return Sampling(**{"max_tokens": OUTPUT, "temperature": 0, **given})  # pyright: ignore[reportArgumentType]


def sequences(params: Sampling, first_slot: int = 0) -> list[Live]:
    return [Live(prompt, params, first_slot + slot) for slot, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("ahead", [1, 2])
def test_options_that_look_back_see_tokens_in_flight(runner: Runner, ahead: int) -> None:
    """Penalties, bad words and draws are the same whether or not the host has seen the last tokens."""
    params = Sampling(
        max_tokens=20,
        seed=3,
        top_p=0.95,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        bad_words=tuple((token, other) for token in range(0, 300, 7) for other in (9, 10)),
        min_tokens=10,
        stop_token_ids=(EOS_ID,),
        logprobs=2,
    )
    patient, hasty = sequences(params), sequences(params)
    Engine(runner, 64, 0).run(patient)
    Engine(runner, 2, ahead).run(hasty)
    assert [each.output for each in patient] == [each.output for each in hasty]
    for one, other in zip(patient, hasty, strict=True):
        for entry, same in zip(one.logprobs, other.logprobs, strict=True):
            assert entry is not None
            assert same is not None
            assert entry.ids == same.ids
            assert entry.values == pytest.approx(same.values, abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_logprobs_equal_hugging_face(runner: Runner, folder: Path, chunk: int) -> None:
    live = [
        *sequences(greedy(logprobs=3, prompt_logprobs=2)),
        Live(PROMPTS[0], greedy(logprobs=-1, prompt_logprobs=-1), 3),
        Live(PROMPTS[2], greedy(), 4),
    ]
    Engine(runner, chunk, 1).run(live)
    for each in live[:4]:
        tokens = each.prompt + each.output
        oracle = hf_logits(folder, tokens).log_softmax(-1)
        entries = each.prompt_logprobs + each.logprobs
        assert len(each.prompt_logprobs) == len(each.prompt) - 1
        for position, entry in enumerate(entries):
            assert entry is not None
            check_entry(entry, oracle[position], tokens[position + 1])
    assert len(live[3].logprobs[0].ids) == VOCAB_SIZE + 1  # pyright: ignore[reportOptionalMemberAccess]
    assert live[4].logprobs == [None] * OUTPUT
    assert live[4].prompt_logprobs == []


def check_entry(entry: TokenLogprobs, oracle: torch.Tensor, token: int) -> None:
    best = oracle.topk(len(entry.ids) - 1)
    assert entry.ids[0] == token
    assert entry.values[0] == pytest.approx(float(oracle[token]), abs=1e-4)
    assert entry.values[1:] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert entry.rank == 1 + int((oracle > oracle[token] + 1e-5).sum())
    assert float(oracle[entry.ids[1]]) == pytest.approx(float(best.values[0]), abs=1e-4)


def test_prompt_longer_than_a_slice_of_logits(
    runner: Runner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.sampling.grouped_logits.WORKSPACE", 4 * VOCAB_SIZE * 2)  # two rows
    live = sequences(greedy(prompt_logprobs=1, logprobs=1))
    Engine(runner, 64, 0).run(live)
    oracle = hf_logits(folder, PROMPTS[2]).log_softmax(-1)
    assert len(live[2].prompt_logprobs) == len(PROMPTS[2]) - 1
    for position, entry in enumerate(live[2].prompt_logprobs):
        check_entry(entry, oracle[position], PROMPTS[2][position + 1])


def test_non_finite_logits_fail_their_row_alone(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_small(folder)
    engine = Engine(runner, 64, 0)
    live = sequences(greedy(logprobs=0), first_slot=2)
    engine.plan(live)
    engine.land()
    healthy = runner._model.logits  # pyright: ignore[reportPrivateUsage]

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = healthy(hidden)
        logits[1, 7] = torch.nan
        return logits

    monkeypatch.setattr(runner._model, "logits", broken)  # pyright: ignore[reportPrivateUsage]
    engine.plan(live)
    answer = engine.land()
    assert answer.failed == {3: NOT_FINITE}
    assert answer.tokens == [expected[0][1], -1, expected[2][1]]


def test_after_a_failed_step_only_one_that_knows_of_it_is_computed(
    folder: Path, expected: list[list[int]]
) -> None:
    """The row of a sequence that the failed step was to bring would be written where another one's lies."""
    runner = open_small(folder)
    new = NewSeq(0, PROMPTS[0], len(PROMPTS[0]), greedy(max_tokens=OUTPUT))
    first = StepInput(1, [new], [SeqStep(0, 0, len(PROMPTS[0]), [3, 4], samples=True)])
    assert runner.launch(first).result().tokens == [expected[0][0]]
    newcomer = NewSeq(1, [7] * 1000, 1000, greedy(max_tokens=1))
    with pytest.raises(ValueError, match="a slot has room"):
        runner.launch(StepInput(2, [newcomer], [SeqStep(1, 0, 4, [5], samples=False)]))
    row = SeqStep(0, len(PROMPTS[0]), 1, [], samples=True, output_index=1)
    with pytest.raises(RuntimeError, match="a step before it failed"):
        runner.launch(StepInput(3, [], [row]))
    assert runner.launch(StepInput(4, [], [row], fresh=True)).result().tokens == [expected[0][1]]
    row = SeqStep(0, len(PROMPTS[0]) + 1, 1, [5], samples=True, output_index=2)
    assert runner.launch(StepInput(5, [], [row])).result().tokens == [expected[0][2]]


def test_warm_up_leaves_no_trace(folder: Path) -> None:
    runner = open_small(folder)
    slots, model = runner._slots, runner._model  # pyright: ignore[reportPrivateUsage]
    assert not slots.tokens[:-1].any()
    assert not slots.block_table[:-1].any()
    assert not any(slots.blocks[:-1])
    for layer in model.attention_layers():
        for part in layer.cache_parts():
            assert not part[: runner.facts.num_blocks].any()
            assert part[runner.facts.num_blocks].any()  # it did run


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_run(folder: Path, dtype: str) -> None:
    runner = open_small(folder, dtype=dtype)
    live = sequences(greedy())
    Engine(runner, 64, 1).run(live)
    assert runner.facts.dtype == dtype
    assert all(len(each.output) == OUTPUT for each in live)


def test_a_share_of_the_machines_memory_bounds_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's memory is what the weights and 40 blocks take twice."""
    block = 4 * BLOCK * 3 * 2 * 2 * 8  # float32, layers, keys and values, heads
    weights = open_small(folder).facts.weight_bytes
    monkeypatch.setattr("worker.devices.cpu.total_memory", lambda: 2 * (weights + 40 * block))
    runner = open_small(folder, gpu_memory_utilization=0.5, num_gpu_blocks_override=None)
    assert (runner.facts.num_blocks, runner.facts.kv_bytes) == (40, 40 * block)
    with pytest.raises(ValueError, match=r"and 0\.00 MiB are there: raise --gpu-memory-utilization"):
        open_small(folder, gpu_memory_utilization=0.1, num_gpu_blocks_override=None)


def test_the_longest_sequence_fills_its_row(folder: Path) -> None:
    """The last position may be computed, and a token sampled after it."""
    runner = open_small(folder, max_model_len=12, num_gpu_blocks_override=3)
    live = [Live(PROMPTS[0], greedy(max_tokens=6), 5)]
    Engine(runner, 64, 1).run(live)
    assert live[0].output == hf_greedy(folder, PROMPTS[:1], 6)[0]


def test_the_seed_decides_dummy_weights(folder: Path) -> None:
    params = Sampling(max_tokens=1, temperature=0, logprobs=3)
    step = StepInput(1, [NewSeq(0, PROMPTS[0], 7, params)], [SeqStep(0, 0, 7, [0, 1], samples=True)])
    first, again, other = (
        open_small(folder, load_format="dummy", seed=seed).launch(step).result().logprobs
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_model_that_overflows_at_warm_up_does_not_start(folder: Path, tmp_path: Path) -> None:
    """All its weights are finite: only a step shows it."""
    broken = shutil.copytree(folder, tmp_path / "model")
    held = load_file(broken / "model.safetensors")
    held["model.norm.weight"].fill_(3e38)
    save_file(held, broken / "model.safetensors")
    with pytest.raises(ValueError, match=f"at warm-up {NOT_FINITE}, though all weights are finite"):
        open_small(broken)
