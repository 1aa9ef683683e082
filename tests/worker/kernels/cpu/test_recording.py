"""Small steps that are replayed, against the same by the model's own code: bit for bit, and in the cache."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path

import pytest
import torch
from compared import Compared, layout_of
from drive import Driver, load_ranks
from tiny import REPLAYED_ENCODERS, VOCAB_SIZE, tiny_checkpoint
from tiny_shapes import EXPERTS_BESIDE, SHARED_CACHES
from torch import Tensor

from models import ops
from models.context import context, use_context
from worker.kernels.cpu import operations
from worker.kernels.cpu import recording as recorder
from worker.kernels.cpu.recording import MOST_TOKENS
from worker.protocol import SeqStep
from worker.tables.positions import Columns, StepTokens
from worker.tables.slots import Slots

BLOCK = 16
SEQUENCES = 100
LENGTH = 64
"""The most tokens of a sequence."""


@pytest.fixture(autouse=True)
def kernels(chosen_level: None) -> Iterator[None]:
    ops.use(operations.open_kernels(2))
    yield
    operations.open_kernels(1)
    ops.use({})


class Texts:
    """Runs and compares steps of an encoder's texts."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self._slots = Slots(torch.device("cpu"), 2 * MOST_TOKENS, LENGTH, BLOCK, paged=False)
        self._slots.tokens.random_(5, VOCAB_SIZE)
        self._layout = layout_of(self._slots)
        self.compared = Compared(forward, self._layout)

    @torch.inference_mode()
    def __call__(self, lengths: Sequence[int], first: int = 0, *, seconds_from: int | None = None) -> Tensor:
        """A step of texts with these lengths, in the rows of the tables from `first` on."""
        seqs = [SeqStep(first + row, 0, length, [], False) for row, length in enumerate(lengths)]
        ids, step = self._lay_out(Columns.of(seqs))
        if seconds_from is not None:
            step.token_types = (step.positions >= seconds_from).long()
        with use_context(step):
            return self.compared(ids, step.positions)

    @property
    def replays(self) -> int:
        return self.compared.replays

    def _lay_out(self, columns: Columns) -> StepTokens:
        return self._layout(columns, self._slots, None)()  # pyright: ignore[reportArgumentType]


def texts_of(folder: Path, dtype: torch.dtype = torch.float32) -> Texts:
    (model,) = load_ranks(folder, dtype=dtype)
    return Texts(model.forward)


def decoding(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Driver, Compared]:
    (model,) = load_ranks(folder, dtype=dtype)
    driver = Driver([model], sequences=SEQUENCES, max_len=LENGTH, block_size=BLOCK, dtype=dtype)
    layout = layout_of(Slots(torch.device("cpu"), SEQUENCES, LENGTH, BLOCK))
    model.forward = compared = Compared(model.forward, layout, model.attention_layers())
    return driver, compared


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return tiny_checkpoint("LlamaForCausalLM", folder, head_dim=16, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("BertModel", tmp_path_factory.mktemp("bert"))


@pytest.fixture
def reasons(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The reasons for which models were not recorded."""
    caplog.set_level("DEBUG", logger=recorder.__name__)
    said = "small steps are not replayed: "
    return lambda: [text.removeprefix(said) for text in caplog.messages if text.startswith(said)]


NOT_REPLAYED = ("Gemma3nForCausalLM", "Jais2ForCausalLM")
_NAMES = """
Llama Mistral Qwen2 Qwen3 Phi3 Gemma Gemma2 Gemma3 Gemma3n Gemma4 Granite SmolLM3 Olmo2
Apertus Arcee Exaone4 Glm4 HunYuanDenseV1 Mixtral Qwen2Moe GraniteMoeShared Glm4Moe GptOss
DeepseekV2 GlmMoeDsa OPT Starcoder2 Cohere2 GPTNeoX Falcon Bloom Nemotron Phi Jais2
"""
DECODERS = [*(f"{name}ForCausalLM" for name in _NAMES.split()), "GPT2LMHeadModel"]
"""Families, and whether their steps are replayed: all of ours but Gemma 3n, none on transformers' code."""


VARIANTS: dict[str, dict[str, object]] = {
    "Gemma4ForCausalLM with shared caches": {**SHARED_CACHES, "head_dim": 256, "global_head_dim": 512},
    "Gemma4ForCausalLM with experts": EXPERTS_BESIDE,
}


TYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("family", "dtype"), [*zip([*DECODERS, *VARIANTS], cycle(TYPES))])
def test_decoders(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    architecture = family.partition(" ")[0]
    driver, compared = decoding(tiny_checkpoint(architecture, tmp_path, **VARIANTS.get(family, {})), dtype)
    driver.hidden({0: range(5, 25), 1: [7], 2: range(40, 53)})
    for token in range(100, 106):
        driver.hidden({0: [token], 1: [token + 1], 2: [token + 2]})
        driver.hidden({token % 3: [token + 3]})
        driver.hidden({0: [token], 1: [token + 1, token]})
    assert compared.replays == (0 if architecture in NOT_REPLAYED else 19)


def mixes() -> Iterator[list[int]]:
    """Lengths of the texts of small steps: the smallest, the largest, the most texts, and others."""
    yield from ([1], [2], [LENGTH], [1] * MOST_TOKENS, [LENGTH] * (MOST_TOKENS // LENGTH))
    chance = random.Random(0)
    for most in (1, 3, 20, LENGTH):
        for rows in (1, 2, 7, MOST_TOKENS // most):
            yield [chance.randint(1, most) for _ in range(rows)]


@pytest.mark.parametrize(("family", "dtype"), [*zip(REPLAYED_ENCODERS, cycle(TYPES))])
def test_encoders(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Every step is replayed, whatever the texts are."""
    texts = texts_of(tiny_checkpoint(f"{family}Model", tmp_path), dtype)
    for lengths in mixes():
        texts(lengths)
    assert texts.replays == len(list(mixes()))


def test_any_number_of_rows(llama: Path) -> None:
    driver, compared = decoding(llama)
    for rows in (1, SEQUENCES, 2, 65, 64, 33, 32, 1, 7):
        driver.hidden({row: [7 + row] for row in range(rows)})
    assert compared.replays == 9


def test_larger_steps_run_the_models_code(bert: Path, llama: Path) -> None:
    texts = texts_of(bert)
    texts([LENGTH] * (MOST_TOKENS // LENGTH) + [1])
    texts([1] * (MOST_TOKENS + 1))
    assert texts.replays == 0
    texts([LENGTH] * (MOST_TOKENS // LENGTH))
    assert texts.replays == 1
    driver, compared = decoding(llama)
    driver.hidden({row: range(60) for row in range(18)})
    assert compared.replays == 0


def test_pairs_of_texts_run_the_models_code(bert: Path) -> None:
    texts = texts_of(bert)
    pairs = texts([20, 9], seconds_from=5)
    assert texts.replays == 0
    assert not torch.equal(pairs, texts([20, 9]))
    assert texts.replays == 1


def test_a_result_outlives_the_next_step(bert: Path) -> None:
    texts = texts_of(bert)
    first = texts([20, 9])
    before = first.clone()
    texts([20, 9], first=2)
    assert torch.equal(first, before)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_text_has_the_same_bits_in_any_batch(bert: Path, threads: int) -> None:
    operations.open_kernels(threads)
    texts = texts_of(bert, torch.bfloat16)
    lengths = [7, 1, LENGTH, 30]
    together = texts(lengths).split(lengths)
    alone = [texts([length], row) for row, length in enumerate(lengths)]
    assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True))
    assert texts.replays == 5


WEIGHT = torch.randn(2 * MOST_TOKENS, MOST_TOKENS)


def in_one_row(rows: Tensor) -> Tensor:
    wide = rows.view(1, -1)
    return ops.add(wide, wide).view(rows.shape)


def as_wide_as_long(rows: Tensor) -> Tensor:
    square = WEIGHT[: len(rows), : len(rows)]
    return ops.add(square, square)


def for_few_tokens(rows: Tensor) -> Tensor:
    if len(rows) > LENGTH:
        raise ValueError(f"{len(rows)} tokens are too many")
    return rows


def added(row: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda rows: ops.add(rows, row(rows))


def twice_if(holds: Callable[[Tensor], bool]) -> Callable[[Tensor], Tensor]:
    return lambda rows: ops.add(rows, rows) if holds(rows) else rows


def without_entry(rows: Tensor) -> Tensor:
    library, _ = operations.choose_kernels()
    assert library is not None
    library.function("allow_tiles")()
    return rows


OTHER_KERNELS = "it calls other kernels for another number of tokens or rows"
CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "longest": (added(lambda _: WEIGHT[max(context().query_lens_host)]), "it reads query_lens_host"),
    "tolist": (
        added(lambda _: WEIGHT[max(context().kv_lens.tolist())]),
        "it needs aten.resolve_conj.default",
    ),
    "numpy": (added(lambda _: WEIGHT[int(context().kv_lens.numpy().max())]), "it needs aten."),
    "item": (added(lambda _: WEIGHT[int(context().kv_lens[0])]), "it needs aten.item.default"),
    "number of tokens": (
        added(lambda rows: WEIGHT[len(rows)]),
        "its calls differ in more than the numbers of tokens and rows",
    ),
    "constant": (
        added(lambda rows: torch.tensor(float(len(rows))).expand(MOST_TOKENS)),
        "it needs aten.lift_fresh.default",
    ),
    "by torch": (lambda rows: rows.tanh(), "it needs aten.tanh.default"),
    "in place": (lambda rows: rows.mul_(2), "it needs aten.mul_.Tensor"),
    "own memory": (
        added(lambda _: torch.empty(MOST_TOKENS).fill_(1)),
        "it needs aten.empty.memory_format",
    ),
    "in one row": (in_one_row, "a result [1, "),
    "as wide as long": (as_wide_as_long, OTHER_KERNELS),
    "many twice": (twice_if(lambda rows: len(rows) >= LENGTH), OTHER_KERNELS),
    "one twice": (twice_if(lambda rows: len(rows) == 1), OTHER_KERNELS),
    "many sequences twice": (twice_if(lambda _: context().kv_lens.shape[0] > 8), OTHER_KERNELS),
    "few tokens": (for_few_tokens, f"{MOST_TOKENS} tokens are too many"),
    "without an entry": (without_entry, "C cannot replay allow_tiles"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_depends_on_more_than_sizes_is_not_replayed(
    name: str, reasons: Callable[[], list[str]]
) -> None:
    change, why = CHANGES[name]
    texts = Texts(lambda ids, positions: change(ops.embed(ids, WEIGHT)))
    for lengths in ([3, 4], [LENGTH], [1], [2, 1, 1]):
        texts(lengths)
    assert texts.replays == 0
    assert [reason[: len(why)] for reason in reasons()] == [why]


def test_float16_is_not_replayed(bert: Path) -> None:
    texts = texts_of(bert, torch.float16)
    texts([3, 4])
    assert texts.replays == 0


def test_a_system_without_memory_for_results_runs_the_models_code(
    bert: Path, monkeypatch: pytest.MonkeyPatch, reasons: Callable[[], list[str]]
) -> None:
    def refuse(nbytes: int) -> Tensor:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(recorder, "huge_pages", refuse)
    texts = texts_of(bert)
    texts([3, 4])
    assert texts.replays == 0
    assert reasons() == ["[Errno 12] Cannot allocate memory"]


def test_a_model_without_room_for_its_results_is_not_replayed(
    bert: Path, monkeypatch: pytest.MonkeyPatch, reasons: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(recorder, "RESULT_BYTES", 100 * MOST_TOKENS)
    texts = texts_of(bert)
    texts([3, 4])
    assert texts.replays == 0
    assert reasons() == ["there is no room for results of 128 bytes for each token"]


NOMIC = {"rotary_scaling_factor": 2, "max_position_embeddings": LENGTH}


@pytest.mark.parametrize(("trained", "replays"), [(LENGTH, 3), (LENGTH - 1, 0)])
def test_texts_that_are_rotated_by_their_length(trained: int, replays: int, tmp_path: Path) -> None:
    """Nomic's BERT, beyond the length of its training, is not replayed if a text can be so long."""
    folder = tiny_checkpoint("NomicBertModel", tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **NOMIC, "max_trained_positions": trained}))
    texts = texts_of(folder)
    for lengths in ([3, 9], [LENGTH], [LENGTH, 1]):
        texts(lengths)
    assert texts.replays == replays
