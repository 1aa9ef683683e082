"""Real engines with tiny models of pictures give the tokens of transformers, however steps are planned."""

from pathlib import Path
from random import Random
from typing import Any

import gemma_pictured
import paligemma_pictured
import pytest
from drafted import asked_at_random
from media_files import noise
from msgspec.structs import replace
from pictured import Answer, Prompt, Prompts, assert_answers, expected, write_pictured
from pictured_chat import LLAVA, SETTINGS
from PIL.Image import Image
from ranks import Layout, Ranks, make
from sizes import engine_config
from tiny import tiny_checkpoint
from torch import nn
from transformers import CLIPImageProcessorPil

from engine_core.engine import Engine
from engine_core.engine_stats import Stats
from engine_core.protocol import AddRequest, Tokens
from models.config import read_config
from worker.capacity import WorkerLimits
from worker.features.media.step_media import StepMedia
from worker.protocol import Sampling, StepInput

OUTPUT = 5
ITEM = 4
"""The embeddings of a picture."""
BESIDE = {
    "block_size": 4,
    "max_model_len": 64,
    "num_gpu_blocks_override": 256,
    "cpu_threads": 1,
    "mm_encoder_cache_gb": 0,
}


class Llava:
    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self.ranks = folder, ranks
        self.model = self.write(folder)
        self.prompts = Prompts(folder)
        one, two = noise(40, 28), noise(31, 90)
        make = self.prompts.make
        self.asked = [
            make([5, 9, 17], one, [44, 200, 7]),
            make([5, 9, 17], one, [80, 81, 82]),  # shares a block that ends inside the picture
            make([5, 9, 17], two, [44, 200, 7]),  # shares none
            make([5, 6, 7, 8, 9], one, [3, 3, 3, 3, 3]),
            make([5, 6, 7, 8, 9], two, [3, 3, 3, 3, 3]),  # shares the block before the picture
            make([5, 6, 7, 8, 9], one, [3, 3, 3, 3, 7]),  # shares what is behind it, too
            make(one, two, one, [12]),
            make([5, 9, 17, 44, 200, 7]),
        ]
        self.answers = [self.right(self.model, each) for each in self.asked]

    def right(self, model: nn.Module, prompt: Prompt) -> Answer:
        return expected(model, prompt, OUTPUT, self.inputs)

    def write(self, folder: Path) -> nn.Module:
        return write_pictured("LlavaForConditionalGeneration", folder, LLAVA, SETTINGS)

    def inputs(self, pictures: list[Image], ids: list[int]) -> dict[str, Any]:
        processor = CLIPImageProcessorPil(**SETTINGS)
        return {"pixel_values": processor(pictures, return_tensors="pt")["pixel_values"]}

    def add(self, id: int, prompt: Prompt) -> AddRequest:
        return AddRequest(
            id,
            prompt.tokens,
            Sampling(OUTPUT, temperature=0, logprobs=0),
            media=self.prompts.media_of(prompt),
        )

    def run(self, prompts: list[Prompt], **options: Any) -> tuple[list[Answer], list[int], Stats]:
        """The answers to all of these at once, how many tokens of each were cached, and statistics."""
        return self.run_waves([prompts], **options)

    def run_waves(self, waves: list[list[Prompt]], **options: Any) -> tuple[list[Answer], list[int], Stats]:
        layout = Layout(options.get("tensor_parallel_size", 1), options.get("pipeline_parallel_size", 1))
        executor: Any = make(self.ranks, layout, []) if layout.size > 1 else None
        engine = Engine.start(engine_config(self.folder, **{**BESIDE, **options}), lambda _: None, executor)
        answers, cached = [Answer() for wave in waves for _ in wave], dict[int, int]()
        ids = iter(range(len(answers)))
        try:
            for wave in waves:
                for prompt in wave:
                    engine.add(0, self.add(next(ids), prompt))
                while engine.busy:
                    for output in engine.step().get(0, []):
                        assert isinstance(output, Tokens), output
                        cached.setdefault(output.id, output.cached)
                        answers[output.id].tokens += output.tokens
                        answers[output.id].logprobs += [entry.values[0] for entry in output.logprobs]
            return answers, [cached[id] for id in sorted(cached)], engine.stats()
        finally:
            engine.stop()


class Gemma3(Llava):
    """Each picture has to be computed in one step, for its tokens see later ones."""

    def write(self, folder: Path) -> nn.Module:
        made = gemma_pictured.FIELDS, gemma_pictured.SETTINGS
        return write_pictured("Gemma3ForConditionalGeneration", folder, *made)

    def inputs(self, pictures: list[Image], ids: list[int]) -> dict[str, Any]:
        return gemma_pictured.inputs(pictures, ids)


class PaliGemma(Llava):
    """Each prompt has to be computed in one step, for its tokens see later ones."""

    def write(self, folder: Path) -> nn.Module:
        return paligemma_pictured.write(2, folder)

    def right(self, model: nn.Module, prompt: Prompt) -> Answer:
        return paligemma_pictured.answer(model, prompt, OUTPUT)


@pytest.fixture(scope="module")
def paligemma(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> PaliGemma:
    return PaliGemma(tmp_path_factory.mktemp("paligemma"), ranks)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Gemma3:
    return Gemma3(tmp_path_factory.mktemp("gemma3"), ranks)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Llava:
    return Llava(tmp_path_factory.mktemp("llava"), ranks)


@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({"steps_ahead": 0, "max_num_batched_tokens": 64}, None),
        ({"steps_ahead": 1, "max_num_batched_tokens": 16}, ITEM),
        (
            {
                "steps_ahead": 2,
                "max_num_batched_tokens": 16,
                "num_gpu_blocks_override": 8,
                "max_model_len": 32,
            },
            ITEM,
        ),
        ({"steps_ahead": 2, "max_num_batched_tokens": 17, "disable_chunked_mm_input": True}, 2 * ITEM),
        ({"max_num_batched_tokens": 1, "max_num_seqs": 1}, ITEM),
        ({"max_num_batched_tokens": 16, "pipeline_parallel_size": 2}, None),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, 3 * ITEM),
    ],
)
def test_sixteen_at_once_get_the_tokens_of_transformers(
    llava: Llava, options: dict[str, Any], room: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if room is not None:
        monkeypatch.setattr(WorkerLimits, "most_embeddings", room)
    answers, _, stats = llava.run(llava.asked * 2, **{"max_num_seqs": 16, **options})
    assert_answers(answers, llava.answers * 2)
    assert stats.media_encoded >= 2 and stats.media_embeddings <= (room or 2 * ITEM)
    assert room is not None or stats.media_encoded == 2, "each picture is encoded once"
    assert (stats.preemptions > 0) == ("num_gpu_blocks_override" in options)
    assert not stats.media_bytes


@pytest.mark.parametrize("room", [ITEM, 64])
def test_known_prefixes_end_before_inside_and_behind_a_picture(
    llava: Llava, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerLimits, "most_embeddings", room)
    answers, cached, _ = llava.run_waves([[each] for each in llava.asked])
    assert_answers(answers, llava.answers)
    assert cached[:6] == [0, 4, 0, 0, 4, 12]


@pytest.mark.parametrize(("kept", "encoded"), [(1, 2), (0, 3)])
def test_pictures_of_later_requests_are_not_encoded_again_if_they_are_kept(
    llava: Llava, kept: int, encoded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerLimits, "most_embeddings", ITEM)
    waves = [[llava.asked[at]] for at in (0, 2, 3)]  # one, the other, and the first behind another text
    cache = kept * ITEM * 32 * 4 / (1 << 30)
    answers, _, stats = llava.run_waves(waves, mm_encoder_cache_gb=cache, enable_prefix_caching=False)
    assert_answers(answers, [llava.answers[at] for at in (0, 2, 3)])
    assert (stats.media_encoded, stats.media_embeddings) == (encoded, (1 + kept) * ITEM)


@pytest.mark.parametrize("late", [False, True])
def test_after_a_failed_step_pictures_are_encoded_again(
    llava: Llava, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step fails before or after it has encoded and forgotten what it should."""
    update, steps = StepMedia.update, list[StepInput]()

    def update_or_fail(self: StepMedia, step: StepInput) -> None:
        if step.encode or step.forget or step.fresh:
            steps.append(step)
        fails = len(steps) == 2 and step is steps[1]
        if late or not fails:
            update(self, step)
        if fails:
            raise RuntimeError("a fault of this test")

    monkeypatch.setattr(StepMedia, "update", update_or_fail)
    monkeypatch.setattr(WorkerLimits, "most_embeddings", ITEM)
    answers, _, _ = llava.run(llava.asked, steps_ahead=2)
    assert_answers(answers, llava.answers)
    assert any(step.fresh for step in steps[2:])


@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({"steps_ahead": 0, "max_num_batched_tokens": 64}, 8 * ITEM),
        ({"steps_ahead": 1, "max_num_batched_tokens": 16}, ITEM),
        ({"steps_ahead": 2, "max_num_batched_tokens": 7, "max_num_seqs": 2}, 2 * ITEM),
        ({"max_num_batched_tokens": 16, "num_gpu_blocks_override": 24, "max_model_len": 40}, ITEM),
        ({"max_num_batched_tokens": 16, "tensor_parallel_size": 2}, ITEM),
        ({"max_num_batched_tokens": 16, "pipeline_parallel_size": 2}, ITEM),
    ],
)
def test_pictures_that_see_both_ways_are_never_cut(
    gemma3: Gemma3, options: dict[str, Any], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerLimits, "most_embeddings", room)
    answers, _, _ = gemma3.run(gemma3.asked * 2, **{"max_num_seqs": 16, **options})
    assert_answers(answers, gemma3.answers * 2)


def test_tokens_of_a_picture_see_later_ones(gemma3: Gemma3) -> None:
    """Otherwise the answers would be others, so the comparison above shows that they do."""

    def causal(pictures: list[Image], ids: list[int]) -> dict[str, Any]:
        return {"pixel_values": gemma3.inputs(pictures, ids)["pixel_values"]}

    other = expected(gemma3.model, gemma3.asked[6], OUTPUT, causal)
    assert other.logprobs != pytest.approx(gemma3.answers[6].logprobs, abs=1e-3)


def test_known_prefixes_end_inside_a_picture_that_sees_both_ways(gemma3: Gemma3) -> None:
    answers, cached, _ = gemma3.run_waves([[each] for each in gemma3.asked])
    assert_answers(answers, gemma3.answers)
    assert cached[1] == 8, "the second block ends inside the picture"


@pytest.mark.parametrize(
    ("options", "preempts"),
    [
        ({"steps_ahead": 0}, False),
        ({"steps_ahead": 2, "max_num_seqs": 3, "max_num_batched_tokens": 64}, False),
        ({"max_num_batched_tokens": 32, "num_gpu_blocks_override": 8, "max_model_len": 32}, True),
        ({"long_prefill_token_threshold": 2, "max_token_gap_ms": 0.001, "max_num_seqs": 5}, False),
        ({"tensor_parallel_size": 2}, False),
        ({"pipeline_parallel_size": 2}, False),
    ],
)
def test_prompts_that_see_both_ways_are_never_cut(
    paligemma: PaliGemma, options: dict[str, Any], preempts: bool
) -> None:
    answers, _, stats = paligemma.run(paligemma.asked * 2, **{"max_num_seqs": 16, **options})
    assert_answers(answers, paligemma.answers * 2)
    assert (stats.preemptions > 0) == preempts


def test_only_equal_prompts_share_what_is_known_of_them(paligemma: PaliGemma) -> None:
    """Keys of all prompts but those depend on tokens that come later."""
    answers, cached, _ = paligemma.run_waves([[each] for each in [*paligemma.asked, paligemma.asked[5]]])
    assert_answers(answers, [*paligemma.answers, paligemma.answers[5]])
    assert cached == [0] * len(paligemma.asked) + [12]


def test_an_answer_that_another_engine_began_goes_on(paligemma: PaliGemma) -> None:
    """The tokens that were emitted are no part of the prompt, so they see none behind them."""
    prompt, right = paligemma.asked[0], paligemma.answers[0].tokens
    add = replace(paligemma.add(0, prompt), tokens=prompt.tokens + right[:3], prompt_len=len(prompt.tokens))
    engine = Engine.start(engine_config(paligemma.folder, **BESIDE), lambda _: None)
    engine.add(0, add)
    tokens: list[int] = []
    while engine.busy:
        for output in engine.step().get(0, []):
            assert isinstance(output, Tokens), output
            tokens += output.tokens
    engine.stop()
    assert tokens == right[3:]


@pytest.mark.parametrize("kind", ["llava", "gemma3", "paligemma"])
def test_a_drafter_beside_pictures_reads_text_alone(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    served: Llava = request.getfixturevalue(kind)
    drafter = tiny_checkpoint("Qwen3ForCausalLM", tmp_path, vocab_size=read_config(served.folder).vocab_size)
    config = {"method": "draft_model", "model": str(drafter)}
    with asked_at_random(Random(3)) as drafted:
        answers, _, _ = served.run(served.asked, max_num_seqs=8, speculative_config=config)
    assert_answers(answers, served.answers)
    assert len(drafted.drafts) > 5
