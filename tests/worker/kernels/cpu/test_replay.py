"""Steps that are replayed, against the same steps by the model's own code: bit for bit, and in the cache."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from drive import Driver, load_ranks
from kernel_levels import NAMES
from sizes import worker_config
from tiny import VOCAB_SIZE, tiny_checkpoint
from torch import Tensor

from models import ops
from models.config import read_config
from models.context import ForwardContext, context, use_context
from models.families.decoders.decoder import Decoder, DecoderAttention
from models.model import CausalLM
from worker.kernels.cpu import operations, replay
from worker.kernels.cpu.positions import Layout
from worker.kernels.cpu.replay import Replayed
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput
from worker.runner import Runner
from worker.tables.slots import Slots

MOST_ROWS = 16
"""Fewer than are replayed otherwise, so that all numbers of rows come up."""

PLAIN = ("positions", "slot_mapping", "query_starts", "kv_lens")
"""Of a step's tensors."""

pytestmark = pytest.mark.skipif(not NAMES, reason="there are no C kernels for this processor")

BLOCK = 16


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(replay, "MOST_ROWS", MOST_ROWS)
    ops.use(operations.open_kernels(2))
    yield
    operations.open_kernels(1)
    ops.use({})


class Compared:
    """A model's forward pass, replayed; each is made by the model's own code as well, in a cache that
    the other has not seen."""

    def __init__(self, model: CausalLM, layout: Layout | None = None) -> None:
        library, _ = operations.choose()
        assert library is not None
        self._layout = layout or Layout(library, Slots(torch.device("cpu"), MOST_ROWS + 1, 64, BLOCK))
        self.steps: Counter[int] = Counter()
        """By rows: of one new token each."""
        self.runs = 0
        """Of the model's code, for the replayed."""
        self._model = model
        self._plain = model.forward
        self._replayed = Replayed(self._count, library, self._layout)

    def __call__(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        step = context()
        if len(ids) == len(step.kv_lens):
            self.steps[len(ids)] += 1
        expected, written = self._run(self._plain, ids, step)
        hidden, same = self._run(self._replayed, *self._brought(ids, step))
        assert torch.equal(hidden, expected)
        assert all(torch.equal(one, other) for one, other in zip(written, same, strict=True))
        return hidden

    @property
    def replays(self) -> int:
        return self.steps.total() - self.runs

    def _brought(self, ids: Tensor, step: ForwardContext) -> tuple[Tensor, ForwardContext]:
        """What stands where the layout has it, as a runner's steps do, if it is one token of each row."""
        if len(ids) != len(step.kv_lens):
            return ids, step
        kept = self._layout.kept(len(ids))
        kept.block_table[:, : step.block_table.shape[1]] = step.block_table
        values = {name: getattr(step, name) for name in PLAIN}
        for name, value in values.items():
            getattr(kept, name).copy_(value)
        kept.ids.copy_(ids)
        tensors = {name: getattr(kept, name) for name in (*PLAIN, "block_table")}
        return kept.ids, replace(step, **tensors)

    def _count(self, ids: Tensor, positions: Tensor, stream: None) -> Tensor:
        if len(ids) == len(context().kv_lens):
            self.runs += 1
        return self._plain(ids, positions)

    def _run(
        self, forward: Callable[..., Tensor], ids: Tensor, step: ForwardContext
    ) -> tuple[Tensor, list[Tensor]]:
        """-> hidden states, and the keys and values that were written."""
        blocks, offsets = step.slot_mapping // step.block_size, step.slot_mapping % step.block_size
        caches = [layer.kv for layer in self._model.attention_layers() if layer.kv is not None]
        for kv in caches:
            kv[:, blocks, :, offsets] = torch.nan
        with use_context(step):
            hidden = forward(ids, step.positions)
        return hidden, [kv[:, blocks, :, offsets] for kv in caches]


def compared(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Driver, Compared]:
    (model,) = load_ranks(folder, dtype=dtype)
    driver = Driver([model], sequences=MOST_ROWS + 1, block_size=BLOCK, dtype=dtype)
    forward = Compared(model)
    model.forward = forward
    return driver, forward


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        "LlamaForCausalLM", tmp_path_factory.mktemp("llama"), head_dim=16, max_position_embeddings=1024
    )


FAMILIES = {
    "Qwen3ForCausalLM": True,
    "Gemma2ForCausalLM": True,
    "Gemma3ForCausalLM": True,
    "GraniteForCausalLM": True,
    "Olmo2ForCausalLM": True,
    "GPT2LMHeadModel": True,
    "OPTForCausalLM": True,
    "Starcoder2ForCausalLM": False,
}
"""Whether steps can be replayed."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    driver, forward = compared(tiny_checkpoint(family, tmp_path), dtype)
    driver.hidden({0: range(5, 25), 1: [7], 2: range(40, 53)})
    for token in range(100, 112):
        driver.hidden({0: [token], 1: [token + 1], 2: [token + 2]})
        driver.hidden({token % 3: [token + 3]})
    assert forward.steps == {1: 12, 3: 12}
    assert forward.replays == (22 if FAMILIES[family] else 0)


def test_a_result_outlives_the_next_step(llama: Path) -> None:
    driver, _ = compared(llama)
    results = [driver.hidden({0: [token]})[0] for token in (5, 6, 7, 8)]
    copies = [result.clone() for result in results]
    driver.hidden({0: [9]})
    assert all(torch.equal(*pair) for pair in zip(results, copies, strict=True))
    assert not torch.equal(results[2], results[3])


def test_only_small_steps_of_one_token_each_are_replayed(llama: Path) -> None:
    driver, forward = compared(llama)
    for _ in range(3):
        driver.hidden({row: [7] for row in range(MOST_ROWS + 1)})
        driver.hidden({0: [8], 1: [9, 10]})
    assert forward.steps == {MOST_ROWS + 1: 3}
    assert forward.replays == 0


def test_without_room_for_its_results_a_step_runs_as_before(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger=replay.__name__)
    monkeypatch.setattr(replay, "RESULT_BYTES", 5_000)  # enough for two rows
    driver, forward = compared(llama)
    for rows in (4, 3, 2, 1) * 4:
        driver.hidden({row: [7] for row in range(rows)})
    assert forward.replays == 6
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "steps of 4 rows and more are not replayed",
        "steps of 3 rows and more are not replayed",
    ]


class Counting(torch.nn.Module):
    """Adds what the host counts to its embeddings: nobody could know it from the calls of one step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.randn(VOCAB_SIZE, 8)

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        rows = torch.nn.functional.embedding(ids, self.weight)
        return rows + torch.tensor(context().kv_lens_host).unsqueeze(-1)

    def attention_layers(self) -> list[torch.nn.Module]:
        return []


def test_what_comes_from_the_host_is_not_taken_for_a_constant() -> None:
    model = Counting()
    forward = Compared(model)  # pyright: ignore[reportArgumentType]
    model.forward = forward
    driver = Driver([model], block_size=BLOCK)  # pyright: ignore[reportArgumentType]
    for _ in range(3):
        driver.hidden({0: [3], 1: [4]})
    assert forward.replays <= 0  # what could not be recorded was begun again


@dataclass
class Life:
    """A sequence as an engine sees it."""

    slot: int
    tokens: list[int]
    prompt_len: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    entered: int = 0
    """Blocks that the worker knows of."""
    new: bool = True

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.computed


class Engine:
    """Sequences begin, some with another's first blocks, are aborted and preempted, as chance has it."""

    SLOTS = MOST_ROWS + 2

    def __init__(self, runner: Runner, seed: int) -> None:
        self.runner = runner
        self.chance = random.Random(seed)
        self.holders = [0] * runner.facts.num_blocks
        self.live: list[Life] = []

    def turn(self) -> None:
        if len(self.live) < self.SLOTS and self.chance.random() < 0.5:
            self.begin()
        if self.chance.random() < 0.04:
            self.give_up(self.chance.choice(self.live))
        if self.chance.random() < 0.04 and self.live:
            old = self.chance.choice(self.live)
            self.give_up(old)
            self.live.append(Life(self.free_slot(), old.tokens, old.prompt_len))
        decoding = [each for each in self.live if each.missing == 1 and not each.new]
        pool = decoding if decoding and self.chance.random() < 0.8 else self.live
        if pool:
            self.step(self.chance.sample(pool, self.chance.randint(1, len(pool))))

    def begin(self) -> None:
        length = self.chance.choice([1, 2, 15, 16, 17, 40, 270, 530])
        life = Life(self.free_slot(), [self.chance.randrange(5, VOCAB_SIZE) for _ in range(length)], length)
        if self.live and self.chance.random() < 0.3:
            other = self.chance.choice(self.live)
            shared = min(other.computed, other.prompt_len) // BLOCK
            life.tokens[:0] = other.tokens[: shared * BLOCK]
            life.prompt_len, life.computed = len(life.tokens), shared * BLOCK
            life.blocks = other.blocks[:shared]
            for block in life.blocks:
                self.holders[block] += 1
        self.live.append(life)

    def free_slot(self) -> int:
        return self.chance.choice(sorted(set(range(self.SLOTS)) - {each.slot for each in self.live}))

    def give_up(self, life: Life) -> None:
        self.live.remove(life)
        for block in life.blocks:
            self.holders[block] -= 1

    def step(self, chosen: list[Life]) -> None:
        new = [self.arrival(each) for each in chosen if each.new]
        seqs = [self.share(each) for each in chosen]
        answer = self.runner.launch(StepInput(number=1, new=new, seqs=seqs)).result()
        for each, seq, token in zip(chosen, seqs, answer.tokens, strict=True):
            if seq.samples:
                each.tokens.append(token)

    def arrival(self, life: Life) -> NewSeq:
        life.new = False
        params = Sampling(max_tokens=1000, temperature=0)
        return NewSeq(slot=life.slot, tokens=list(life.tokens), prompt_len=life.prompt_len, params=params)

    def share(self, life: Life) -> SeqStep:
        start, count = life.computed, self.chance.randint(1, life.missing)
        life.computed += count
        while len(life.blocks) * BLOCK < life.computed:
            block = self.chance.choice([at for at, holders in enumerate(self.holders) if not holders])
            self.holders[block] += 1
            life.blocks.append(block)
        gained, life.entered = life.blocks[life.entered :], len(life.blocks)
        return SeqStep(slot=life.slot, start=start, count=count, blocks=gained, samples=life.missing == 0)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("bfloat16", None), ("float32", None), ("bfloat16", "int8")]
)
def test_an_eventful_life(llama: Path, dtype: str, quantization: str | None, threads: int) -> None:
    config = worker_config(
        folder=str(llama),
        model=read_config(llama),
        dtype=dtype,
        quantization=quantization,
        cpu_threads=threads,
        max_num_seqs=Engine.SLOTS,
        block_size=BLOCK,
        num_gpu_blocks_override=1200,
        max_model_len=1024,
    )
    runner = Runner(config, lambda stage, fraction: None)
    runner._forward = forward = Compared(runner._model, runner._lay_out)
    engine = Engine(runner, seed=threads)
    for _ in range(250):
        engine.turn()
    assert set(forward.steps) >= set(range(1, MOST_ROWS))
    assert forward.replays > 100
    runner.close()


def longest_by_list() -> int:
    return max(context().kv_lens_host)


def longest_by_tolist() -> int:
    return max(context().kv_lens.tolist())


def longest_by_numpy() -> int:
    return int(context().kv_lens.numpy().max())


def generated(runner: Runner, tokens: int) -> list[int]:
    """The likeliest tokens after a prompt."""
    prompt = NewSeq(slot=0, tokens=[5, 6, 7], prompt_len=3, params=Sampling(max_tokens=tokens, temperature=0))
    read = SeqStep(slot=0, start=0, count=3, blocks=[0, 1], samples=True)
    found = runner.launch(StepInput(number=1, new=[prompt], seqs=[read])).result().tokens
    for at in range(3, 3 + tokens):
        step = SeqStep(slot=0, start=at, count=1, blocks=[], samples=True)
        found += runner.launch(StepInput(number=at, new=[], seqs=[step])).result().tokens
    return found


@pytest.mark.parametrize("longest", [longest_by_list, longest_by_tolist, longest_by_numpy])
def test_a_model_that_branches_by_the_length_is_not_recorded(
    llama: Path, longest: Callable[[], int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that rotates nothing beyond 14 tokens: a recording would rotate for ever."""
    attend = DecoderAttention.forward
    config = worker_config(folder=str(llama), model=read_config(llama), num_blocks=8, block_size=16)
    caplog.set_level("DEBUG", logger=replay.__name__)
    texts: dict[str, list[int]] = {}
    for name, most in (("always rotated", 1000), ("recorded", 14), ("unrecorded", 14)):

        def forward(self: DecoderAttention, x: Tensor, cos_sin: Tensor | None, most: int = most) -> Tensor:
            return attend(self, x, cos_sin if longest() <= most else None)

        monkeypatch.setattr(DecoderAttention, "forward", forward)
        runner = Runner(config, lambda stage, fraction: None)
        if name == "unrecorded":
            runner._forward = runner._model.forward
        texts[name] = generated(runner, 25)
    assert texts["recorded"] == texts["unrecorded"] != texts["always rotated"]
    assert texts["recorded"][:12] == texts["always rotated"][:12]
    assert "not replayed: the model" in caplog.text


def test_the_runner_replays(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the decode of the warm-up, a step of one token is known."""
    config = worker_config(
        folder=str(llama), model=read_config(llama), num_gpu_blocks_override=64, cpu_threads=1
    )
    runner = Runner(config, lambda stage, fraction: None)
    new = NewSeq(slot=0, tokens=[5], prompt_len=1, params=Sampling(max_tokens=2, temperature=0))
    step = SeqStep(slot=0, start=0, count=1, blocks=[3], samples=True)
    first = runner.launch(StepInput(number=1, new=[new], seqs=[step])).result().tokens

    def refuse(*_: object) -> Tensor:
        raise AssertionError("the model's code ran")

    monkeypatch.setattr(Decoder, "forward", refuse)
    assert runner.launch(StepInput(number=2, new=[new], seqs=[step])).result().tokens == first
