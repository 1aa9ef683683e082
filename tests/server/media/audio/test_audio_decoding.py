"""Decoding of recordings: every container, and files of which nothing is read."""

from io import BytesIO

import numpy as np
import pytest
from sounds import CONTAINERS, RATE, silence, tone, written

from server.errors import ApiError
from server.media.audio.audio_decoding import decode_audio

SECOND = tone(1.0)


def decoded(file: bytes, most: float = 60.0) -> np.ndarray:
    return np.concatenate(list(decode_audio(BytesIO(file), most)))


def refused(file: bytes, most: float = 60.0) -> str:
    with pytest.raises(ApiError) as found:
        decoded(file, most)
    assert found.value.status == 400
    return found.value.message


def frequency(samples: np.ndarray) -> float:
    return float(np.abs(np.fft.rfft(samples[:RATE])).argmax()) * RATE / len(samples[:RATE])


@pytest.mark.parametrize("name", CONTAINERS)
def test_each_container_gives_its_samples(name: str) -> None:
    samples = decoded(written(SECOND, name, channels=2))
    assert abs(len(samples) - RATE) < 2048  # some codecs fill their last block
    middle = samples[4000:12000]
    assert np.abs(middle).max() == pytest.approx(0.3, abs=0.04)
    assert abs(frequency(samples) - 440) < 2


@pytest.mark.parametrize("rate", (8_000, 22_050, 44_100, 96_000))
def test_tones_of_other_rates_keep_frequency_and_level(rate: int) -> None:
    samples = decoded(written(tone(1.0, 1000.0, rate=rate), rate=rate))
    assert abs(len(samples) - RATE) <= 32
    assert abs(frequency(samples) - 1000) < 2
    assert np.sqrt(np.mean(np.square(samples[1000:-1000]))) == pytest.approx(0.3 / np.sqrt(2), rel=0.01)


@pytest.mark.parametrize(
    "file",
    (
        b"",
        b"\xff\xd8\xff\xe0" + bytes(600),
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"#EXTM3U\n#EXTINF:1,\nhttp://localhost/a.ts\n",
        b"RIFF\xff\xff\xff\xffWAVEfmt ",
    ),
)
def test_what_is_no_recording_is_refused(file: bytes) -> None:
    assert "recording must be one of" in refused(file) or "cannot be decoded" in refused(file)


def test_tags_in_another_encoding_harm_nothing() -> None:
    tag = b"IART\x06\x00\x00\x00J\xfcrgen"
    artist = b"LIST" + (4 + len(tag)).to_bytes(4, "little") + b"INFO" + tag
    plain = written(SECOND)
    at = plain.index(b"data")
    assert np.array_equal(decoded(plain[:at] + artist + plain[at:]), decoded(plain))


def test_a_codec_that_nobody_knows_is_refused() -> None:
    file = written(SECOND, "webm").replace(b"A_OPUS", b"A_ZZZZ")
    assert refused(file) == "The recording has a codec that is not known here."


def test_rates_and_channels_have_bounds() -> None:
    assert "this one has 1 and 1000" in refused(written(tone(0.2, rate=1000), rate=1000))
    assert "this one has 1 and 384000" in refused(written(tone(0.1, rate=384_000), rate=384_000))
    assert "this one has 16 and 16000" in refused(written(tone(0.1), channels=16))


def test_a_longer_recording_is_refused_while_it_is_decoded() -> None:
    assert "at most 2 seconds" in refused(written(silence(600), "flac"), 2.0)


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_file_that_ends_too_early_is_refused_or_shorter(name: str) -> None:
    file = written(SECOND, name)
    for end in range(0, len(file), len(file) // 10):
        try:
            assert len(decoded(file[:end])) <= RATE + 2048
        except ApiError as error:
            assert error.status == 400
