"""A runner whose small steps are replayed, against one whose model's code runs in each step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opened import open_embedder, open_runner
from tiny import tiny_checkpoint
from torch import Tensor

from models.config import read_config
from models.context import context
from models.conversion.conversion_choice import resolve_conversion
from models.families.decoders.decoder import Decoder
from models.families.decoders.decoder_attention import DecoderAttention
from models.families.encoders.encoder import Encoder
from models.pooling.config import read_pooling
from worker.kernels.cpu import recording as recorder
from worker.protocol import NewSeq, Pooling, Sampling, SeqStep, StepInput, Vectors
from worker.runner import Runner
from worker.steps.compute import Compute
from worker.steps.output import NOT_FINITE_VALUES

pytestmark = pytest.mark.usefixtures("chosen_level")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return tiny_checkpoint("LlamaForCausalLM", folder, head_dim=16, max_position_embeddings=1024)


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


def embeds(*texts: list[int], **options: Any) -> StepInput:
    new = [NewSeq(slot, text, len(text), Pooling(task="embed", **options)) for slot, text in enumerate(texts)]
    seqs = [SeqStep(slot, 0, len(tokens), [], False, pools=True) for slot, tokens in enumerate(texts)]
    return StepInput(number=1, new=new, seqs=seqs)


def test_texts_are_replayed(tmp_path: Path, refuse: Callable[[], None]) -> None:
    runner = open_embedder(tiny_checkpoint("BertModel", tmp_path))
    compute = plain_of(runner)
    steps = [
        embeds([5, 6, 7], [8, 9]),
        embeds([5, 6, 7], [8, 9, 10], second_at=1),
        embeds([5, 6, 7], [8, 9]),
        embeds([5, 6, 7], [8, 9, 10], skip=2),
    ]

    def vectors() -> list[dict[int, Vectors]]:
        return [runner.launch(step).result().pooled for step in steps]

    one_call, replayed = compute.replay, compute.forward
    compute.replay, compute.forward = None, runner._model.forward
    expected = vectors()
    assert expected[0] == expected[2] != expected[1]
    assert len(expected[0]) == 2
    compute.replay, compute.forward = one_call, replayed
    refuse()
    assert vectors() == expected
    one_of_them_broken = runner.launch(embeds([5, 6, 7], [8, 1 << 20])).result()
    assert one_of_them_broken.failed == {1: NOT_FINITE_VALUES}
    assert one_of_them_broken.pooled == {0: expected[0][0]}
    compute.replay = None
    assert runner.launch(steps[0]).result().pooled == expected[0]
    with pytest.raises(AssertionError, match="the model's code ran"):
        runner.launch(embeds(*[[5] * 400] * 3))
    runner.close()


def test_the_last_chunk_of_a_prompt_is_one_call(llama: Path) -> None:
    runner = open_runner(llama, num_gpu_blocks_override=8, block_size=16)
    new = NewSeq(0, [*range(5, 25)], 20, Pooling(task="embed"))
    chunks = [SeqStep(0, 0, 12, [3], False), SeqStep(0, 12, 8, [1], False, pools=True)]

    def vectors() -> dict[int, Vectors]:
        runner.launch(StepInput(1, [new], chunks[:1])).result()
        return runner.launch(StepInput(2, [], chunks[1:])).result().pooled

    one_call = vectors()
    plain_of(runner).replay = None
    assert vectors() == one_call != {}
    runner.close()


def test_pairs_are_scored_behind_one_call(tmp_path: Path, refuse: Callable[[], None]) -> None:
    """The head is torch's own, behind a recording that ends with merged rows."""
    folder = tiny_checkpoint("BertForSequenceClassification", tmp_path, num_labels=1)
    model = read_config(folder)
    served_as = {
        "conversion": resolve_conversion(model, folder),
        "pooling": read_pooling(folder, model, {}),
    }
    runner = open_runner(folder, **served_as)
    compute = plain_of(runner)
    new = [NewSeq(slot, [5, 6, 7 + slot], 3, Pooling("classify", second_at=2)) for slot in range(3)]
    step = StepInput(1, new, [SeqStep(slot, 0, 3, [], False, pools=True) for slot in range(3)])
    one_call, compute.replay = compute.replay, None
    expected = runner.launch(step).result().pooled
    compute.replay = one_call
    refuse()
    assert runner.launch(step).result().pooled == expected
    assert len({scores.data for scores in expected.values()}) == 3
    runner.close()
