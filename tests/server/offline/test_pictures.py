"""Pictures that programs hand over: answers of a tiny LLaVA are those of transformers, in every form."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import paligemma_pictured
import pytest
import torch
from media_files import noise, saved
from pictured import Prompts, expected
from pictured_chat import SETTINGS, write_llava
from PIL.Image import Image
from tiny import BOS
from transformers import CLIPImageProcessorPil

from server.errors import BadRequest
from server.offline.async_llm import AsyncLLM
from server.offline.llm import LLM
from server.requests.beam_search import BeamSearchParams
from server.requests.pooling import PoolingParams
from server.requests.sampling_params import SamplingParams

ONE, TWO = noise(40, 28), noise(31, 90)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@dataclass
class Pictured:
    llm: LLM
    folder: Path
    model: Any
    tokenizer: Any

    def right(self, *pieces: str | Image) -> list[int]:
        encoded = [
            self.tokenizer.encode(each, add_special_tokens=False).ids if isinstance(each, str) else each
            for each in pieces
        ]
        prompt = Prompts(self.folder).make(*encoded)

        def inputs(pictures: list[Image], ids: list[int]) -> dict[str, torch.Tensor]:
            processor = CLIPImageProcessorPil(**SETTINGS)
            return {"pixel_values": processor(pictures, return_tensors="pt")["pixel_values"]}

        return expected(self.model, prompt, 6, inputs).tokens


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pictured]:
    folder = tmp_path_factory.mktemp("llava")
    model, tokenizer = write_llava(folder)
    with LLM(str(folder), dtype="float32", num_gpu_blocks_override=100, max_num_seqs=4) as llm:
        yield Pictured(llm, folder, model, tokenizer)


def test_prompts_have_pictures_in_every_form(pictured: Pictured, tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    path.write_bytes(saved(ONE))
    text = "user: see <image> and <image> "
    forms = [[ONE, TWO], [saved(ONE), TWO], [str(path), saved(TWO)], [path, TWO], [np.array(ONE), TWO]]
    prompts: list[Any] = [{"prompt": text, "multi_modal_data": {"image": each}} for each in forms]
    answers = pictured.llm.generate([*prompts, "plain text"], GREEDY)
    right = pictured.right(BOS, "user: see ", ONE, " and ", TWO, " ")
    assert [answer.outputs[0].token_ids for answer in answers[:5]] == [right] * 5
    assert answers[0].prompt == text and len(answers[5].outputs[0].token_ids) == 6


def test_each_round_of_a_beam_search_sees_the_pictures(pictured: Pictured) -> None:
    prompt: Any = {"prompt": "see <image> here", "multi_modal_data": {"image": ONE}}
    (found,) = pictured.llm.beam_search(prompt, BeamSearchParams(1, 6, ignore_eos=True))
    assert found.sequences[0].tokens[-6:] == pictured.right(BOS, "see ", ONE, " here")


def test_a_prompt_that_begins_with_a_picture_has_its_mark_behind_it(tmp_path: Path) -> None:
    model, tokenizer = paligemma_pictured.write_with_tokenizer(tmp_path)
    ids = tokenizer.encode("<bos>what is it\n", add_special_tokens=False).ids
    right = paligemma_pictured.answer(model, Prompts(tmp_path).make(ONE, ids), 6).tokens
    prompt: Any = {"prompt": "<image><bos>what is it\n", "multi_modal_data": {"image": ONE}}
    said = [{"type": "text", "text": "what is it"}, {"type": "image_pil", "image_pil": ONE}]
    with LLM(str(tmp_path), dtype="float32", num_gpu_blocks_override=200, max_num_seqs=4) as llm:
        answers = llm.generate(prompt, GREEDY) + llm.chat([{"role": "user", "content": said}], GREEDY)
    assert [answer.outputs[0].token_ids for answer in answers] == [right] * 2


def test_conversations_have_pictures(pictured: Pictured) -> None:
    url = "data:image/png;base64," + base64.b64encode(saved(ONE)).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_pil", "image_pil": ONE},
        {"type": "image", "image": ONE},
    ]
    talks = [
        [{"role": "user", "content": [{"type": "text", "text": "an <image> is "}, part]}] for part in parts
    ]
    answers = pictured.llm.chat(talks, GREEDY)
    right = pictured.right("user: an <", "image> is ", ONE, " ")
    assert [answer.outputs[0].token_ids for answer in answers] == [right] * 3
    assert answers[0].prompt is not None and "an <image> is" in answers[0].prompt


def test_questions_are_about_the_pictures_of_a_text(pictured: Pictured) -> None:
    asked = [{"type": "predicate", "instructions": each} for each in ("It is red.", "It is a dog.")]

    def decided(picture: Image) -> list[object]:
        url = "data:image/png;base64," + base64.b64encode(saved(picture)).decode()
        content = [{"type": "input_text", "text": "See "}, {"type": "input_image", "image_url": url}]
        [found] = pictured.llm.decide([{"role": "user", "content": content}], asked)
        return [each.probability for each in found.answers]

    one, two = decided(ONE), decided(TWO)
    assert len({*one, *two}) == 4 and decided(ONE) == one


def test_prepared_pictures_are_kept_until_they_are_to_be_forgotten(pictured: Pictured) -> None:
    def hits() -> Any:
        embedded = pictured.llm.embed({"prompt": "see <image>", "multi_modal_data": {"image": ONE}})
        assert len(embedded) == 1
        found: dict[str, Any] = {metric.name: metric for metric in pictured.llm.get_metrics()}
        return found["vllm:mm_cache_hits"].value

    hits()
    before = hits()
    assert hits() == before + 1
    pictured.llm.reset_mm_cache()
    assert hits() == before + 1


def test_prompts_with_pictures_are_embedded(pictured: Pictured) -> None:
    prompts: list[Any] = ["a text"]
    prompts += [{"prompt": "see <image>", "multi_modal_data": {"image": each}} for each in (ONE, TWO, ONE)]
    vectors = [np.array(one.outputs.embedding) for one in pictured.llm.embed(prompts)]
    assert np.array_equal(vectors[1], vectors[3]) and np.abs(vectors[1] - vectors[2]).max() > 1e-3
    [again] = pictured.llm.encode(prompts[1], pooling_params=PoolingParams(task="embed"))
    assert np.array_equal(np.array(again.outputs.data), vectors[1])


def test_contents_with_pictures_are_scored(pictured: Pictured) -> None:
    def content(*parts: str | Image) -> Any:
        return {
            "content": [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {"type": "image_pil", "image_pil": part}
                for part in parts
            ]
        }

    def embedded(text: str, *pictures: Image) -> np.ndarray:
        """The vector without the token that begins texts, but no conversations."""
        prompt: Any = {"prompt": text, "multi_modal_data": {"image": [*pictures]}}
        [whole] = pictured.llm.embed(prompt)
        keep = len(whole.prompt_token_ids) - 1
        [vector] = pictured.llm.embed(prompt, truncate_prompt_tokens=keep, truncation_side="left")
        return np.array(vector.outputs.embedding)

    [asked] = pictured.llm.embed(pictured.llm.tokenizer.encode("user: what is it? ", False))
    query = np.array(asked.outputs.embedding)
    pages = [embedded("user: an <image> ", ONE), embedded("user: <image><image> ", TWO, ONE)]
    documents = [content("an ", ONE), content(TWO, ONE)]
    scores = [one.outputs.score for one in pictured.llm.score("what is it?", documents, use_tqdm=False)]
    assert np.allclose(scores, [query @ page for page in pages], atol=1e-5)
    [same] = [one.outputs.score for one in pictured.llm.score(documents[1], documents[1])]
    assert abs(same - 1) < 1e-5 and scores[0] != scores[1]


def test_prompts_with_pictures_are_cut_before_them_only(pictured: Pictured) -> None:
    prompt: Any = {"prompt": "user: see <image> now", "multi_modal_data": {"image": ONE}}
    [whole] = pictured.llm.generate(prompt, GREEDY)
    cut = msgspec.structs.replace(GREEDY, truncate_prompt_tokens=len(whole.prompt_token_ids) - 2)
    [left] = pictured.llm.generate(prompt, cut)
    assert left.prompt_token_ids == whole.prompt_token_ids[2:]
    within = msgspec.structs.replace(
        GREEDY, truncate_prompt_tokens=whole.prompt_token_ids[::-1].index(310) + 2
    )
    with pytest.raises(BadRequest, match="would cut a media item of 4 tokens in two"):
        pictured.llm.generate(prompt, within)
    [first] = pictured.llm.embed(prompt, truncate_prompt_tokens=len(whole.prompt_token_ids) - 1)
    assert first.prompt_token_ids == whole.prompt_token_ids[:-1]


@pytest.mark.slow
async def test_asyncio_programs_have_pictures(pictured: Pictured) -> None:
    prompt: Any = {"prompt": "user: see <image> ", "multi_modal_data": {"image": ONE}}
    twice: Any = {"prompt": "user: <image> or <image> ", "multi_modal_data": {"image": [saved(TWO), ONE]}}
    options: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 100, "max_num_seqs": 4}
    async with AsyncLLM(str(pictured.folder), **options) as engine:

        async def answer(prompt: Any) -> list[int]:
            outputs = [one async for one in engine.generate(prompt, GREEDY)]
            assert outputs[-1].prompt == prompt["prompt"]
            return outputs[-1].outputs[0].token_ids

        answers = await asyncio.gather(answer(prompt), answer(twice))
        pooled = [one async for one in engine.encode(prompt, PoolingParams(task="embed"))]
        with pytest.raises(BadRequest, match="2 pictures, and 1 places"):
            await answer({**prompt, "multi_modal_data": {"image": [ONE, TWO]}})
    assert answers == [
        pictured.right(BOS, "user: see ", ONE, " "),
        pictured.right(BOS, "user: ", TWO, " or ", ONE, " "),
    ]
    [vector] = pictured.llm.embed(prompt)
    assert np.array_equal(pooled[0].outputs.data, np.array(vector.outputs.embedding, np.float32))


def test_what_does_not_fit_is_refused(pictured: Pictured) -> None:
    data = {"image": [ONE, TWO]}
    with pytest.raises(BadRequest, match="has 2 pictures, and 1 places for them, '<image>' each"):
        pictured.llm.generate({"prompt": "<image>", "multi_modal_data": data}, GREEDY)
    with pytest.raises(TypeError, match="a picture is one of Pillow"):
        pictured.llm.generate({"prompt": "<image>", "multi_modal_data": {"image": [3]}}, GREEDY)
    with pytest.raises(BadRequest, match="audio are not supported by this model, only text and images are"):
        pictured.llm.generate({"prompt": "<image>", "multi_modal_data": {"audio": [b""]}}, GREEDY)
    with pytest.raises(BadRequest, match="no public address"):
        url = {"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}
        pictured.llm.chat([{"role": "user", "content": [url]}], GREEDY)
