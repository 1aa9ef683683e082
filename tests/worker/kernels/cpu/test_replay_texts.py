"""Texts of encoders that are replayed, against the same by the model's own code: bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from drive import load_ranks
from kernel_levels import NAMES
from sizes import worker_config
from tiny import ENCODERS, VOCAB_SIZE, tiny_checkpoint
from torch import Tensor

from models import ops
from models.config import read_config
from models.context import context, use_context
from models.conversion.served_as import Conversion
from models.families.encoders.encoder import Encoder
from worker.kernels.cpu import operations, replay_texts
from worker.kernels.cpu.positions import MOST_TOKENS, Layout
from worker.protocol import NewSeq, Pooling, SeqStep, StepInput
from worker.runner import Runner
from worker.tables.positions import Columns, Laid
from worker.tables.slots import Slots

ROWS, LENGTH = 600, 64

pytestmark = pytest.mark.skipif(not NAMES, reason="there are no C kernels for this processor")


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    ops.use(operations.open_kernels(2))
    yield
    operations.open_kernels(1)
    ops.use({})


class Compared:
    """A forward pass that is replayed if it can be, and beside it the model's own."""

    def __init__(self, forward: Callable[..., Tensor], length: int = LENGTH) -> None:
        library, _ = operations.choose()
        assert library is not None
        self._slots = Slots(torch.device("cpu"), ROWS, length, 16, paged=False)
        self._slots.tokens.random_(5, VOCAB_SIZE)
        self._layout = Layout(library, self._slots)
        self._plain = forward
        self._runs = 0
        self._replayed = replay_texts.replay_texts(self._count, library, self._layout, length)
        self._runs = 0
        self.steps = 0

    @property
    def replays(self) -> int:
        return self.steps - self._runs

    def lay(self, lengths: Sequence[int], first: int = 0) -> Laid:
        """Texts of such lengths, which are those of the rows from `first` on."""
        seqs = [SeqStep(first + row, 0, length, [], False) for row, length in enumerate(lengths)]
        return self._layout(Columns.of(seqs), self._slots, None)()  # pyright: ignore[reportArgumentType]

    @torch.inference_mode()
    def __call__(self, lengths: Sequence[int], first: int = 0, *, seconds_from: int | None = None) -> Tensor:
        ids, step = self.lay(lengths, first)
        if seconds_from is not None:
            step.token_types = (step.positions >= seconds_from).long()
        with use_context(step):
            expected = self._plain(ids, step.positions, None)
            hidden = self._replayed(ids, step.positions, None)
        self.steps += 1
        assert torch.equal(hidden, expected)
        assert not hidden.isnan().any()
        return hidden

    def _count(self, ids: Tensor, positions: Tensor, stream: Tensor | None) -> Tensor:
        self._runs += 1
        return self._plain(ids, positions, stream)


def compared(folder: Path, dtype: torch.dtype = torch.float32) -> Compared:
    (model,) = load_ranks(folder, dtype=dtype)
    return Compared(model.forward)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("BertModel", tmp_path_factory.mktemp("bert"))


def mixes() -> Iterator[list[int]]:
    """Lengths of the texts of small steps: the smallest, the largest, the most texts, and others."""
    yield from ([1], [2], [LENGTH], [1] * MOST_TOKENS, [LENGTH] * (MOST_TOKENS // LENGTH))
    chance = random.Random(0)
    for most in (1, 3, 20, LENGTH):
        for rows in (1, 2, 7, MOST_TOKENS // most):
            yield [chance.randint(1, most) for _ in range(min(rows, MOST_TOKENS))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ENCODERS)
def test_families(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """All of them are replayed, whatever the texts."""
    forward = compared(tiny_checkpoint(f"{family}Model", tmp_path), dtype)
    for lengths in mixes():
        forward(lengths)
    assert forward.replays == forward.steps == len(list(mixes()))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_text_has_the_same_bits_in_any_company(bert: Path, threads: int) -> None:
    operations.open_kernels(threads)
    forward = compared(bert, torch.bfloat16)
    lengths = [7, 1, LENGTH, 30]
    together = forward(lengths).split(lengths)
    alone = [forward([length], row) for row, length in enumerate(lengths)]
    assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True))
    assert forward.replays == 5


def test_larger_steps_run_the_models_code(bert: Path) -> None:
    forward = compared(bert)
    forward([LENGTH] * (MOST_TOKENS // LENGTH) + [1])
    forward([1] * (MOST_TOKENS + 1))
    assert forward.replays == 0
    forward([LENGTH] * (MOST_TOKENS // LENGTH))
    assert forward.replays == 1


def test_pairs_of_texts_run_the_models_code(bert: Path) -> None:
    forward = compared(bert)
    pairs = forward([20, 9], seconds_from=5)
    assert forward.replays == 0
    assert not torch.equal(pairs, forward([20, 9]))
    assert forward.replays == 1


def test_a_result_outlives_the_next_step(bert: Path) -> None:
    forward = compared(bert)
    first = forward([20, 9])
    kept = first.clone()
    forward([30, 9, 4], first=2)
    assert torch.equal(first, kept)


def reason(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = caplog.records
    return record.message


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("DEBUG", logger=replay_texts.__name__)
    return caplog


def test_what_is_left_to_torch_is_not_replayed(bert: Path, told: pytest.LogCaptureFixture) -> None:
    (model,) = load_ranks(bert)
    forward = Compared(lambda ids, positions, stream: model.forward(ids, positions).tanh())
    forward([3, 4])
    assert forward.replays == 0
    assert reason(told) == "texts are not replayed: the model needs aten.tanh.default"


def test_what_the_host_makes_is_not_taken_for_a_constant(told: pytest.LogCaptureFixture) -> None:
    weight = torch.randn(VOCAB_SIZE, 1)

    def forward(ids: Tensor, positions: Tensor, stream: Tensor | None) -> Tensor:
        rows = ops.embed(ids, weight)
        return ops.add(rows, torch.tensor([float(len(ids))]))

    compared = Compared(forward)
    compared([3, 4])
    compared([3, 5])
    assert compared.replays == 0
    assert "lift_fresh" in reason(told)


def test_types_that_no_kernel_knows_are_not_replayed(bert: Path) -> None:
    forward = compared(bert, torch.float16)
    forward([3, 4])
    assert forward.replays == 0


def by_the_longest(ids: Tensor, weight: Tensor) -> Tensor:
    return ops.embed(ids, weight[max(context().query_lens_host) :])


def by_the_number(ids: Tensor, weight: Tensor) -> Tensor:
    return ops.embed(ids, weight[len(ids) :])


def in_one_row(ids: Tensor, weight: Tensor) -> Tensor:
    wide = ops.embed(ids, weight).view(1, -1)
    return ops.add(wide, wide).view(len(ids), -1)


def as_wide_as_long(ids: Tensor, weight: Tensor) -> Tensor:
    square = weight[: len(ids), : len(ids)]
    return ops.add(square, square)


def many_twice(ids: Tensor, weight: Tensor) -> Tensor:
    rows = ops.embed(ids, weight)
    return ops.add(rows, rows) if len(ids) >= LENGTH else rows


@pytest.mark.parametrize(
    ("rows_of", "why"),
    [
        (by_the_longest, "the model reads query_lens_host"),
        (by_the_number, "calls differ in more than the numbers of tokens and texts"),
        (in_one_row, "a result [1, "),
        (as_wide_as_long, "other texts are computed otherwise"),
        (many_twice, "other texts are computed otherwise"),
    ],
)
def test_what_depends_on_more_than_the_counts_is_not_replayed(
    rows_of: Callable[[Tensor, Tensor], Tensor], why: str, told: pytest.LogCaptureFixture
) -> None:
    weight = torch.randn(2 * MOST_TOKENS, MOST_TOKENS)
    forward = Compared(lambda ids, positions, stream: rows_of(ids, weight))
    for lengths in ([3, 4], [LENGTH], [2, 1, 1]):
        forward(lengths)
    assert forward.replays == 0
    assert reason(told).startswith(f"texts are not replayed: {why}")


def test_without_room_for_its_results_a_step_runs_as_before(
    bert: Path, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replay_texts, "RESULT_BYTES", 100 * MOST_TOKENS)
    forward = compared(bert)
    forward([3, 4])
    assert forward.replays == 0
    assert reason(told) == "texts are not replayed: no room for results of 128 bytes for each token"


@pytest.mark.parametrize("length", [1, 2, 3, 100, MOST_TOKENS - 1, MOST_TOKENS, 2 * MOST_TOKENS])
def test_whatever_the_longest_text(bert: Path, length: int) -> None:
    (model,) = load_ranks(bert)
    forward = Compared(model.forward, length)
    for lengths in ([1], [min(length, 500)], [min(length, 30)] * 9, [1] * 300):
        forward(lengths)
    assert forward.replays == (4 if length > 1 else 0)


NOMIC = {"rotary_scaling_factor": 2, "max_position_embeddings": LENGTH}


@pytest.mark.parametrize(("trained", "replays"), [(LENGTH, 3), (LENGTH - 1, 0)])
def test_texts_that_are_turned_by_their_length(trained: int, replays: int, tmp_path: Path) -> None:
    """Nomic's, beyond the length of the training: not replayed if a text can be so long."""
    folder = tiny_checkpoint("NomicBertModel", tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **NOMIC, "max_trained_positions": trained}))
    forward = compared(folder)
    for lengths in ([3, 9], [LENGTH], [LENGTH, 1]):
        forward(lengths)
    assert forward.replays == replays


def test_the_runner_replays(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_config(bert)
    conversion = Conversion(runner="pooling", convert="embed", architecture=model.architecture)
    config = worker_config(folder=str(bert), model=model, conversion=conversion, cpu_threads=1)
    runner = Runner(config, lambda stage, fraction: None)
    monkeypatch.setattr(runner, "_forward", runner._model.forward)
    step = texts([5, 6, 7], [8, 9])
    expected = runner.launch(step).result().pooled
    monkeypatch.undo()

    def refuse(*_: object) -> Tensor:
        raise AssertionError("the model's code ran")

    monkeypatch.setattr(Encoder, "forward", refuse)
    assert runner.launch(step).result().pooled == expected
    assert len(expected) == 2
    with pytest.raises(AssertionError, match="the model's code ran"):
        runner.launch(texts(*[[5] * 400] * 2))
    runner.close()


def texts(*given: list[int]) -> StepInput:
    params = Pooling(task="embed")
    new = [NewSeq(slot, tokens, len(tokens), params) for slot, tokens in enumerate(given)]
    seqs = [SeqStep(slot, 0, len(tokens), [], False, pools=True) for slot, tokens in enumerate(given)]
    return StepInput(number=1, new=new, seqs=seqs)
