"""Sounds that programs hand over: answers of a tiny Qwen2-Audio are those of transformers, in every form."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heard import AUDIO, Heard
from pictured import Prompts, expected
from pictured_chat import write_chat_files
from sounds import noise, tone, written
from tiny import BOS
from tokenizers import Tokenizer

from server.errors import BadRequest
from server.offline.llm import LLM
from server.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.slow(3)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ONE = (noise(0.8) * 32767).astype(np.int16) / np.float32(32768)
"""Samples as a file of 16 bits has them."""
BEGIN, END = "<|audio_bos|>", "<|audio_eos|>"
PLACE = f"{BEGIN}<|AUDIO|>{END}"


@dataclass
class Hearing:
    llm: LLM
    right: list[list[int]]
    """The answers to `user: hear ONE `, as a text, which begins with a token of its own, and as a chat."""


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hearing]:
    folder = tmp_path_factory.mktemp("qwen2-audio")
    heard = Heard("qwen2 audio", folder)
    tokenizer: Tokenizer = write_chat_files(folder, {AUDIO: "<|AUDIO|>", 311: BEGIN, 312: END}, PLACE)
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("c.type == 'image'", "c.type == 'audio'"))

    def answer(text: str) -> list[int]:
        before, behind = (tokenizer.encode(each, add_special_tokens=False).ids for each in (text, " "))
        prompt = Prompts(folder).make(before, [311], ONE, [312], behind)
        return expected(heard.model, prompt, 6, lambda sounds, ids: heard.inputs(sounds)).tokens

    right = [answer(f"{begin}user: hear ") for begin in (BOS, "")]
    with LLM(str(folder), dtype="float32", num_gpu_blocks_override=100, max_num_seqs=4) as llm:
        yield Hearing(llm, right)


def test_prompts_and_conversations_have_sounds_in_every_form(hearing: Hearing, tmp_path: Path) -> None:
    file = written(ONE)
    path = tmp_path / "one sound.wav"
    path.write_bytes(file)
    text = f"user: hear {PLACE} "
    forms = [ONE, torch.from_numpy(ONE), (ONE, 16_000), path, str(path), file, [ONE]]
    prompts: Any = [{"prompt": text, "multi_modal_data": {"audio": form}} for form in forms]
    base64_file = base64.b64encode(file).decode()
    parts: list[dict[str, Any]] = [
        {"type": "input_audio", "input_audio": {"data": base64_file, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{base64_file}"}},
        {"type": "audio_url", "audio_url": {"url": f"file://{path}"}},
        {"type": "audio_url", "audio_url": {"url": path.as_uri()}},
        {"type": "audio", "audio": ONE},
    ]
    talks = [[{"role": "user", "content": [{"type": "text", "text": "hear "}, part]}] for part in parts]
    for answers, right in zip(
        (hearing.llm.generate(prompts, GREEDY), hearing.llm.chat(talks, GREEDY)), hearing.right, strict=True
    ):
        assert [answer.outputs[0].token_ids for answer in answers] == [right] * len(answers)


def test_sounds_of_other_rates_are_resampled(hearing: Hearing) -> None:
    texts: Any = [
        {"prompt": PLACE, "multi_modal_data": {"audio": (tone(1.0, rate=rate), rate)}}
        for rate in (16_000, 44_100)
    ]
    one, other = hearing.llm.generate(texts, GREEDY)
    assert len(one.prompt_token_ids) == len(other.prompt_token_ids) > 25


@pytest.mark.parametrize(
    ("media", "error", "words"),
    [
        ({"audio": [ONE, ONE]}, BadRequest, "2 sounds, and 1 places"),
        ({"audio": tone(31)}, BadRequest, "30 seconds of a sound"),
        ({"audio": (ONE, 100)}, BadRequest, "samples a second"),
        ({"audio": np.zeros((2, 9), np.float32)}, TypeError, "a sound is an array"),
        ({"audio": b"none"}, BadRequest, "A recording must be one of"),
        ({"image": b"none"}, BadRequest, "images are not supported by this model, only text and audio are"),
        ({"video": b"none"}, BadRequest, "videos are not supported by this model, only text and audio are"),
        ({"sound": ONE}, TypeError, "'audio': ..."),
    ],
)
def test_what_does_not_fit_is_refused(
    hearing: Hearing, media: dict[str, Any], error: type[Exception], words: str
) -> None:
    prompt: Any = {"prompt": PLACE, "multi_modal_data": media}
    with pytest.raises(error, match=words):
        hearing.llm.generate(prompt, GREEDY)
