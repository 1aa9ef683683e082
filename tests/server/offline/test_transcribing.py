"""`LLM.transcribe`: the same of a path and of its samples, alone and together."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_whisper
from heard import AUDIO, Heard
from msgspec.structs import replace
from pictured_chat import write_chat_files
from sounds import noise, written

from facet import LLM
from server.errors import BadRequest
from server.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.slow(3)


def test_paths_and_samples_give_the_same(tmp_path: Path) -> None:
    tiny_whisper.make(tmp_path / "whisper")
    sounds = [noise(3.0), noise(31.0, seed=1)]
    paths = [tmp_path / f"{number}.wav" for number in range(2)]
    for path, sound in zip(paths, sounds, strict=True):
        path.write_bytes(written(sound))
    heard = [(sound * 32767).astype(np.int16) / np.float32(32768) for sound in sounds]
    with LLM(str(tmp_path / "whisper"), dtype="float32") as llm:
        [alone] = llm.transcribe(paths[1], temperature=0.0, language="german")
        both = llm.transcribe(heard, language="de")
        assert both[1].segments and both[1] == alone
        assert (both[0].duration, both[0].language) == (3.0, "de")
        timed = llm.transcribe(paths[1], language="de", word_timestamps=True)[0].segments
        assert [replace(each, words=[]) for each in timed] == alone.segments
        assert any(each.words for each in timed)
        ways: list[Any] = [{"chunking_strategy": way} for way in ("auto", {"type": "auto"})]
        assert llm.transcribe(paths[1], **ways[0]) == llm.transcribe(paths[1], **ways[1])
        with pytest.raises(BadRequest, match="not a language"):
            llm.transcribe(paths[0], language="klingon")


def test_a_model_that_hears_in_chats_transcribes_by_them(tmp_path: Path) -> None:
    Heard("qwen3 asr", tmp_path)
    names = {AUDIO: "<|audio_pad|>", 311: "<|audio_start|>", 312: "<|audio_end|>"}
    write_chat_files(tmp_path, names, "".join(names[id] for id in (311, AUDIO, 312)))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(path.read_text().replace("c.type == 'image'", "c.type == 'audio'"))
    sound = noise(1.4)
    with LLM(str(tmp_path), dtype="float32", max_model_len=90, max_num_seqs=2) as llm:
        [found] = llm.transcribe(sound, language="German", prompt="gulls")
        talk: list[Any] = [
            {"role": "system", "content": "gulls"},
            {"role": "user", "content": [{"type": "audio", "audio": sound}]},
            {"role": "assistant", "content": "language German<asr_text>"},
        ]
        ways: Any = {"continue_final_message": True, "add_generation_prompt": False}
        [answer] = llm.chat(talk, SamplingParams(temperature=0, max_tokens=None), **ways)
        assert found.text == answer.outputs[0].text.strip() != ""
        assert (found.language, found.duration, found.segments) == ("de", 1.4, [])
        assert len({llm.transcribe([sound, sound])[each].text for each in range(2)}) == 1
        with pytest.raises(BadRequest, match="tells no times"):
            llm.transcribe(sound, word_timestamps=True)
