"""Steps of prompts, chunks and texts that are replayed as graphs, by the stand-in that makes calls again."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from bits_traffic import Result
from interpreted import DEVICE
from interpreted_device import CARD, ON_A_CARD, Interpreted
from recorded_graphs import RecordedGraphs
from replayed import run
from sizes import worker_config
from tiny import tiny_checkpoint

from engine_core.protocol import AddRequest
from models.config import read_config
from models.conversion.conversion_choice import Conversion
from worker.kernels.cuda import attention_plan
from worker.kernels.cuda.attention_plan import Heads, PlanKey, plan_step
from worker.kernels.cuda.steps import mixed_step
from worker.kernels.cuda.steps.layout_kernels import StepTensors
from worker.kernels.cuda.steps.mixed_step import MixedStep
from worker.kernels.cuda.steps.step_graphs import Graphs
from worker.protocol import NewSeq, Pooling, Sampling, SeqStep, StepInput, Vectors
from worker.runner import Runner
from worker.steps.compute import Compute
from worker.tables.positions import Columns, StepTokens, lay_out
from worker.tables.slots import Slots
from worker.tables.staging import Packet

MOST_TOKENS = 24
SHARED = [*range(5, 21)]
GREEDY = Sampling(max_tokens=8, temperature=0, prompt_logprobs=1)
DRAWN = Sampling(max_tokens=9, temperature=0.8, top_p=0.9, seed=7)
REPORTED = Sampling(max_tokens=8, temperature=0.9, seed=9, logprobs=2, logit_bias={3: 4.0})
REQUESTS = [
    AddRequest(0, [*SHARED, 40], GREEDY),
    AddRequest(1, [41, 42], DRAWN),
    AddRequest(2, [*SHARED, 43, 44], REPORTED),
    AddRequest(3, [*range(60, 91)], Pooling(task="embed", skip=2)),
    AddRequest(4, [*SHARED, 45, 46], Pooling(task="token_embed")),
    AddRequest(5, [*SHARED, 40], DRAWN),
]

TWO_KINDS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SHAPES: dict[str, dict[str, object]] = {
    "Qwen3_5ForCausalLM": {**TWO_KINDS, "linear_num_key_heads": 1, "linear_num_value_heads": 1},
    "GraniteMoeHybridForCausalLM": {
        **TWO_KINDS,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "num_local_experts": 0,
    },
    "NemotronHForCausalLM": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 4,
    },
}
"""Hybrids of few heads, for each is a program."""

pytestmark = pytest.mark.skipif(ON_A_CARD, reason="on a card, workers use its kernels anyway")


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each step that is computed as it comes."""
    tokens: list[int] = []
    compute = Compute.__call__

    def noted(self: Compute, batch: Any) -> Any:
        tokens.append(sum(seq.count for seq in batch.step.seqs))
        return compute(self, batch)

    monkeypatch.setattr(Compute, "__call__", noted)
    return tokens


def run_all(
    folder: Path, requests: list[AddRequest], request: pytest.FixtureRequest, **options: Any
) -> tuple[Interpreted, list[int]]:
    """Answer requests on the CPU and by replayed steps -> the device, and the steps that it computed."""
    options = {
        "max_model_len": 36,
        "max_num_batched_tokens": MOST_TOKENS,
        "max_token_gap_ms": 60_000,
        **options,
    }
    expected, _ = run(folder, requests, **options)
    device: Interpreted = request.getfixturevalue("device")
    device.most_tokens = MOST_TOKENS
    computed: list[int] = request.getfixturevalue("computed")
    found, preemptions = run(folder, requests, ready=computed.clear, **options)
    assert_same(found, expected)
    assert preemptions > 0 or options["num_gpu_blocks_override"] is None
    return device, computed


def numbers(vectors: Vectors | None) -> torch.Tensor:
    return torch.frombuffer(bytearray(vectors.data if vectors else b"\0\0\0\0"), dtype=torch.float32)


def assert_same(found: dict[int, Result], expected: dict[int, Result]) -> None:
    """Compare tokens exactly, and numbers as far as two orders of sums allow."""
    for id, one in found.items():
        other = expected[id]
        assert (one.finish, one.tokens) == (other.finish, other.tokens)
        torch.testing.assert_close(numbers(one.vectors), numbers(other.vectors), atol=2e-5, rtol=2e-4)
        mine = [*one.logprobs, *(one.prompt_logprobs or [])]
        theirs = [*other.logprobs, *(other.prompt_logprobs or [])]
        assert [each.ids for each in mine] == [each.ids for each in theirs]
        for a, b in zip(mine, theirs, strict=True):
            assert a.values == pytest.approx(b.values, abs=1e-4)


@pytest.mark.parametrize(
    ("architecture", "steps_ahead"),
    [
        ("Qwen3ForCausalLM", 2),
        ("YoutuForCausalLM", 1),
        ("Qwen3_5ForCausalLM", 1),
        ("GraniteMoeHybridForCausalLM", 2),
        ("NemotronHForCausalLM", 1),
    ],
)
def test_results_are_those_of_the_cpu(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    steps_ahead: int,
) -> None:
    """Prompts in chunks beside decoding rows and texts, prefix hits, and sequences that lose their place.

    Hybrids go on from remembered states, and keep some. Latents of all but short prompts that follow nothing
    become keys and values.
    """
    monkeypatch.setattr(attention_plan, "LEAST_MADE", 9)
    folder = tiny_checkpoint(architecture, tmp_path, **SHAPES.get(architecture, {"num_hidden_layers": 1}))
    options = {
        "steps_ahead": steps_ahead,
        "num_gpu_blocks_override": 9,
        "enable_prefix_caching": True,
        "runner": "generate",
        "tasks": ["generate", "embed", "token_embed"],
        "pooler_config": {"pooling_type": "MEAN"},
        "speculative_config": None,  # hybrids on CPUs take guesses, and none on a card
    }
    device, computed = run_all(folder, REQUESTS, request, **options)
    assert computed == [], "every step is replayed"
    # Single tokens, prompts of 24 and 16 tokens, and again, but up to their logits and hidden states.
    kinds = [range(3), range(3, 5), range(5, 8), range(8, 10)]
    assert len(device.graphs.captured) == 10
    assert all(set(device.graphs.replayed) & {*kind} for kind in kinds), "steps of all kinds were replayed"


def test_texts_of_encoders_are_replayed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Pairs of texts too, and a text that is too long for graphs is computed as it comes."""
    folder = tiny_checkpoint("BertModel", tmp_path, num_hidden_layers=2)
    texts = [
        AddRequest(id, [*range(5 + id, 5 + id + length)], Pooling(task="embed"))
        for id, length in enumerate((9, 3, 30))
    ]
    pairs = [
        AddRequest(3 + id, [*range(9, 20)], Pooling(task="embed", second_at=at))
        for id, at in enumerate((4, 9))
    ]
    options = {"max_num_batched_tokens": 40, "runner": "pooling", "convert": "embed"}
    options |= {"num_gpu_blocks_override": None, "enable_prefix_caching": False}
    device, computed = run_all(folder, [*texts, *pairs], request, **options)
    assert len(device.graphs.captured) == 2
    assert device.graphs.replayed and computed and min(computed) > MOST_TOKENS


def prompts_beside_decodes() -> list[StepInput]:
    """A prompt beside a part of another, then both beside a third, and then a step of single tokens."""
    prompts = [*range(5, 10)], [*range(20, 29)], [*range(30, 33)]
    asked = [Sampling(max_tokens=9, temperature=degree, seed=7) for degree in (0.9, 0.8, 0)]
    new = [NewSeq(slot, prompts[slot], len(prompts[slot]), asked[slot]) for slot in range(3)]
    first = [SeqStep(0, 0, 5, [0, 1], True), SeqStep(1, 0, 4, [2], False)]
    second = [SeqStep(0, 5, 1, [], True, 1), SeqStep(1, 4, 5, [3, 4], True), SeqStep(2, 0, 3, [5], True)]
    third = [SeqStep(0, 6, 1, [], True, 2), SeqStep(1, 9, 1, [], True, 1), SeqStep(2, 3, 1, [], True, 1)]
    return [StepInput(1, new[:2], first), StepInput(2, new[2:], second), StepInput(3, [], third)]


SINGLE, TO_TOKENS, SINGLE_TO_LOGITS, TO_HIDDEN = 0, 3, 4, 7
"""The numbers of the first graph of each kind: of three sizes of single tokens, and one of prompts."""


@pytest.mark.parametrize(
    ("most_samples", "draws", "replayed"),
    [
        (64, True, [TO_TOKENS, TO_TOKENS, SINGLE]),
        (2, True, [TO_TOKENS, TO_HIDDEN, SINGLE]),
        (64, False, [TO_HIDDEN, TO_HIDDEN, SINGLE_TO_LOGITS]),
    ],
    ids=["to tokens", "too many rows sample", "the kernel draws wrong"],
)
def test_rows_that_sample_nothing_write_no_token(
    tmp_path: Path,
    device: Interpreted,
    monkeypatch: pytest.MonkeyPatch,
    most_samples: int,
    draws: bool,
    replayed: list[int],
) -> None:
    """Replayed steps leave the tables as others do, and go to the tokens where they can."""
    if not draws:
        device._draw_into = None  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(mixed_step, "MOST_SAMPLES", most_samples)
    folder = tiny_checkpoint("Qwen3ForCausalLM", tmp_path, num_hidden_layers=1)
    sizes = {"max_num_seqs": 3, "block_size": 4, "max_model_len": 20, "num_gpu_blocks_override": 9}
    results: list[tuple[list[list[int]], list[list[int]]]] = []
    for device.most_tokens in (0, 16):
        runner = Runner(
            worker_config(folder=str(folder), model=read_config(folder), **sizes), lambda *_: None
        )
        while runner.prepare():
            pass
        tokens = [runner.launch(step).result().tokens for step in prompts_beside_decodes()]
        results.append((tokens, runner._slots.tokens[:3].tolist()))  # pyright: ignore[reportPrivateUsage]
        runner.close()
    assert results[0] == results[1]
    assert [tokens.count(-1) for tokens in results[0][0]] == [1, 0, 0]
    assert device.graphs.replayed == replayed


KEY: PlanKey = (Heads(8, 2, 64), torch.bfloat16, True)
SLOTS, BLOCK = 5, 4


class Place:
    """A place for steps of up to so many tokens, and a packet that must grow for it."""

    def __init__(self, tokens: int, max_len: int = 40, rows: int = SLOTS, *, paged: bool = True) -> None:
        self.slots = Slots(DEVICE, rows, max_len, BLOCK, paged=paged)
        self.slots.tokens.copy_(torch.randint(5, 300, self.slots.tokens.shape))
        self.slots.block_table.copy_(
            torch.arange(self.slots.block_table.numel()).view_as(self.slots.block_table)
        )
        self.buffer = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
        most = StepTensors.make(DEVICE, tokens, rows, self.slots.most_blocks)
        key = (*KEY[:2], paged)
        self.step = MixedStep(tokens, rows, CARD, self.slots, [key], self.buffer, most)
        self.step.clear()
        self._packet = Packet(self._buffers, 8)

    def stage(
        self, held: list[int], starts: list[int], counts: list[int], sampling: Sequence[int] = ()
    ) -> Callable[[], StepTokens]:
        self._packet.reset()
        self.columns = columns_of_rows(held, starts, counts)
        staged = self.step.stage(self.columns, sampling, self._packet)
        self._packet.send()
        return staged

    def _buffers(self, words: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(words, dtype=torch.int32), torch.zeros(words, dtype=torch.int32, device=DEVICE)


def host_buffer(words: int) -> tuple[torch.Tensor, torch.Tensor]:
    buffer = torch.zeros(words, dtype=torch.int32)
    return buffer, buffer


def columns_of_rows(held: list[int], starts: list[int], counts: list[int]) -> Columns:
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    return Columns(held, starts, counts, ends, [sum(counts[:row]) for row in range(len(counts) + 1)])


@pytest.mark.parametrize("paged", [True, False])
def test_a_smaller_step_is_laid_out_as_any_other(paged: bool) -> None:
    place = Place(16, paged=paged)
    for rows in (([3, 0, 1], [7, 0, 20], [1, 11, 2]), ([2], [0], [3])):
        if not paged:
            rows = (rows[0], [0] * len(rows[0]), rows[2])
        staged = place.stage(*rows)
        assert staged is not None
        packet = Packet(host_buffer, 999)
        ids, context = lay_out(place.columns, place.slots, packet)()
        all_ids, mine = place.step.lay_out()
        count = len(ids)
        assert staged()[0].tolist() == all_ids[:count].tolist() == ids.tolist()
        assert mine.positions.tolist() == context.positions.tolist() + [0] * (16 - count)
        assert mine.query_starts.tolist() == context.query_starts.tolist() + [count] * (SLOTS - len(rows[0]))
        assert mine.kv_lens.tolist() == context.kv_lens.tolist() + [0] * (SLOTS - len(rows[0]))
        if paged:
            scratch = int(place.slots.block_table[place.slots.dummy, 0]) * BLOCK
            assert mine.slot_mapping.tolist() == context.slot_mapping.tolist() + [scratch] * (16 - count)
            for row, end in enumerate(place.columns.ends):
                blocks = -(-end // BLOCK)
                assert mine.block_table[row, :blocks].tolist() == context.block_table[row, :blocks].tolist()
        assert mine.plan is not None
        (launches,) = mine.plan.values()
        step = plan_step(CARD, (*KEY[:2], paged), rows[2], place.columns.ends)
        planned = [blocks for blocks, _ in step]
        assert [
            blocks.rows[blocks.rows >= 0].tolist() for blocks in launches if (blocks.rows >= 0).any()
        ] == [blocks.rows.tolist() for blocks in planned]


def test_a_long_sequence_is_split_in_a_graph_as_by_itself() -> None:
    """A row of 8192 tokens beside a prompt: it has the 32 splits that it would have alone."""
    place = Place(64, 8192, rows=64)
    place.stage([0, 1], [8191, 0], [1, 9])
    _, context = place.step.lay_out()
    assert context.plan is not None
    short = context.plan[KEY][0]
    assert (short.rows == 0).sum() == 32
    assert short.tokens[short.rows == 0].tolist() == [31 << 16 | split for split in range(32)]


def test_a_graph_is_at_most_twice_as_large_as_its_step(
    tmp_path: Path, device: Interpreted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest graph takes every smaller step; a size for which there was no memory is missing."""
    device.most_tokens = 64
    folder = tiny_checkpoint("BertModel", tmp_path, num_hidden_layers=1)
    capture = RecordedGraphs.__call__
    short = iter([False, True])  # at the second of 64, 32 and 16 tokens

    def limited(self: RecordedGraphs, work: Callable[[], Any]) -> Any:
        if next(short, False):
            raise torch.OutOfMemoryError
        return capture(self, work)

    monkeypatch.setattr(RecordedGraphs, "__call__", limited)
    config = worker_config(
        folder=str(folder),
        model=read_config(folder),
        conversion=Conversion(runner="pooling", convert="embed", architecture="BertModel"),
        max_num_seqs=2,
        max_model_len=128,
    )
    runner = Runner(config, lambda phase, part: None)
    graphs = runner._compute  # pyright: ignore[reportPrivateUsage]
    assert isinstance(graphs, Graphs)
    packet = Packet(host_buffer, 999)
    found: dict[int, int | None] = {}
    for count in (1, 16, 17, 31, 32, 64, 65):
        staged = graphs.stage_mixed(columns_of_rows([0], [0], [count]), [], packet)
        found[count] = None if staged is None else staged.form.tokens
    assert found == {1: 16, 16: 16, 17: None, 31: None, 32: 64, 64: 64, 65: None}
    runner.close()
