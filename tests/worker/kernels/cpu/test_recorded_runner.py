"""A runner whose small steps are replayed, against one whose model's code runs in each step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from compared import Compared
from opened import open_embedder, open_runner
from tiny import VOCAB_SIZE, tiny_checkpoint
from torch import Tensor

from models.context import context
from models.families.decoders.decoder import Decoder
from models.families.decoders.decoder_attention import DecoderAttention
from models.families.encoders.encoder import Encoder
from worker.kernels.cpu import recording as recorder
from worker.protocol import NewSeq, Pooling, Sampling, SeqStep, StepInput
from worker.runner import Runner
from worker.steps.compute import Compute


@dataclass
class Life:
    """A sequence as the scheduler sees it."""

    slot: int
    tokens: list[int]
    prompt_len: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    entered: int = 0
    """The number of blocks that the worker knows of."""
    new: bool = True

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.computed


class RandomScheduler:
    """Begins sequences, some with another's first blocks, and aborts and preempts some, at random."""

    def __init__(self, runner: Runner, *, slots: int, block_size: int, seed: int) -> None:
        self.runner = runner
        self.slots = slots
        self.block_size = block_size
        self.random = random.Random(seed)
        self.holders = [0] * runner.facts.num_blocks
        self.live: list[Life] = []

    def turn(self) -> None:
        if len(self.live) < self.slots and self.random.random() < 0.5:
            self.begin()
        if self.random.random() < 0.04:
            self.give_up(self.random.choice(self.live))
        if self.random.random() < 0.04 and self.live:
            old = self.random.choice(self.live)
            self.give_up(old)
            self.live.append(Life(self.free_slot(), old.tokens, old.prompt_len))
        decoding = [each for each in self.live if each.missing == 1 and not each.new]
        pool = decoding if decoding and self.random.random() < 0.8 else self.live
        if pool:
            self.step(self.random.sample(pool, self.random.randint(1, len(pool))))

    def begin(self) -> None:
        length = self.random.choice([1, 2, 15, 16, 17, 40, 270, 530])
        life = Life(self.free_slot(), [self.random.randrange(5, VOCAB_SIZE) for _ in range(length)], length)
        if self.live and self.random.random() < 0.3:
            other = self.random.choice(self.live)
            shared = min(other.computed, other.prompt_len) // self.block_size
            life.tokens[:0] = other.tokens[: shared * self.block_size]
            life.prompt_len, life.computed = len(life.tokens), shared * self.block_size
            life.blocks = other.blocks[:shared]
            for block in life.blocks:
                self.holders[block] += 1
        self.live.append(life)

    def free_slot(self) -> int:
        return self.random.choice(sorted(set(range(self.slots)) - {each.slot for each in self.live}))

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
        start, count = life.computed, self.random.randint(1, life.missing)
        life.computed += count
        while len(life.blocks) * self.block_size < life.computed:
            block = self.random.choice([at for at, holders in enumerate(self.holders) if not holders])
            self.holders[block] += 1
            life.blocks.append(block)
        gained, life.entered = life.blocks[life.entered :], len(life.blocks)
        return SeqStep(slot=life.slot, start=start, count=count, blocks=gained, samples=life.missing == 0)


pytestmark = pytest.mark.usefixtures("chosen_level")

BLOCK = 16
SLOTS = 18


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return tiny_checkpoint("LlamaForCausalLM", folder, head_dim=16, max_position_embeddings=1024)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("bfloat16", None), ("float32", None), ("bfloat16", "int8")]
)
def test_any_mix_of_steps(llama: Path, dtype: str, quantization: str | None, threads: int) -> None:
    sizes = {"max_num_seqs": SLOTS, "block_size": BLOCK, "num_gpu_blocks_override": 1200}
    given = {"dtype": dtype, "quantization": quantization, "cpu_threads": threads, "max_model_len": 1024}
    runner = open_runner(llama, **sizes, **given)
    model = runner._model
    compute = plain_of(runner)
    compared = Compared(model.forward, compute.lay_out, model.attention_layers())
    compute.forward = compared
    scheduler = RandomScheduler(runner, slots=SLOTS, block_size=BLOCK, seed=threads)
    for _ in range(250):
        scheduler.turn()
    decodes = [tokens for tokens, rows in compared.sizes if tokens == rows]
    assert set(decodes) >= set(range(1, 16))
    assert len(decodes) < compared.replays < len(compared.sizes)  # others were replayed too, the largest not
    runner.close()


def plain_of(runner: Runner) -> Compute:
    assert isinstance(runner._compute, Compute)
    return runner._compute


def generated(runner: Runner, tokens: int) -> list[int]:
    """The likeliest tokens after a prompt."""
    prompt = NewSeq(slot=0, tokens=[5, 6, 7], prompt_len=3, params=Sampling(max_tokens=tokens, temperature=0))
    read = SeqStep(slot=0, start=0, count=3, blocks=[0, 1], samples=True)
    found = runner.launch(StepInput(number=1, new=[prompt], seqs=[read])).result().tokens
    for at in range(3, 3 + tokens):
        step = SeqStep(slot=0, start=at, count=1, blocks=[], samples=True)
        found += runner.launch(StepInput(number=at, new=[], seqs=[step])).result().tokens
    return found


@pytest.mark.parametrize(
    "longest",
    [
        lambda: max(context().kv_lens_host),
        lambda: max(context().kv_lens.tolist()),
        lambda: int(context().kv_lens.numpy().max()),
    ],
    ids=["list", "tolist", "numpy"],
)
def test_a_model_that_branches_by_the_length_is_not_recorded(
    llama: Path, longest: Callable[[], int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model rotates nothing beyond 14 tokens, and a recording would go on to rotate."""
    attend = DecoderAttention.forward
    caplog.set_level("DEBUG", logger=recorder.__name__)
    texts: dict[str, list[int]] = {}
    for name, most in (("always rotated", 1000), ("recorded", 14), ("unrecorded", 14)):

        def forward(self: DecoderAttention, x: Tensor, cos_sin: Tensor | None, most: int = most) -> Tensor:
            return attend(self, x, cos_sin if longest() <= most else None)

        monkeypatch.setattr(DecoderAttention, "forward", forward)
        runner = open_runner(llama, num_gpu_blocks_override=8, block_size=16)
        if name == "unrecorded":
            plain_of(runner).forward = runner._model.forward
        texts[name] = generated(runner, 25)
    assert texts["recorded"] == texts["unrecorded"] != texts["always rotated"]
    assert texts["recorded"][:12] == texts["always rotated"][:12]
    assert "small steps are not replayed" in caplog.text


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the code of models fail from now on."""

    def fail(*_: object) -> Tensor:
        raise AssertionError("the model's code ran")

    return lambda: [monkeypatch.setattr(each, "forward", fail) for each in (Decoder, Encoder)] and None


def test_a_prompt_and_its_decode_are_replayed(llama: Path, refuse: Callable[[], None]) -> None:
    runner = open_runner(llama, num_gpu_blocks_override=64)
    before = generated(runner, 5)
    refuse()
    assert generated(runner, 5) == before
    runner.close()


def embeds(*texts: list[int]) -> StepInput:
    new = [NewSeq(slot, tokens, len(tokens), Pooling(task="embed")) for slot, tokens in enumerate(texts)]
    seqs = [SeqStep(slot, 0, len(tokens), [], False, pools=True) for slot, tokens in enumerate(texts)]
    return StepInput(number=1, new=new, seqs=seqs)


def test_texts_are_replayed(tmp_path: Path, refuse: Callable[[], None]) -> None:
    runner = open_embedder(tiny_checkpoint("BertModel", tmp_path))
    compute = plain_of(runner)
    replayed, compute.forward = compute.forward, runner._model.forward
    expected = runner.launch(embeds([5, 6, 7], [8, 9])).result().pooled
    compute.forward = replayed
    refuse()
    assert runner.launch(embeds([5, 6, 7], [8, 9])).result().pooled == expected
    assert len(expected) == 2
    with pytest.raises(AssertionError, match="the model's code ran"):
        runner.launch(embeds(*[[5] * 400] * 2))
    runner.close()
