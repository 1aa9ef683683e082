"""`LLM.transcribe`: the same of a path and of its samples, alone and together."""

from pathlib import Path

import numpy as np
import pytest
import tiny_whisper
from msgspec.structs import replace
from sounds import noise, written

from facet import LLM
from server.errors import BadRequest

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
        with pytest.raises(BadRequest, match="no language"):
            llm.transcribe(paths[0], language="klingon")
