"""Videos are decoded from the files that are listed, and others are refused in a sentence."""

import base64
import sys

import numpy as np
import pytest
from media_files import noise, saved
from video_files import jpeg_url, video_file

from server.errors import BadRequest
from server.media.video_decoding import decode_video

MUCH = 1 << 20


@pytest.mark.parametrize("kind", ["mp4", "matroska", "avi", "mpegts"])
def test_frames_of_files(kind: str) -> None:
    video = decode_video(video_file(12, 64, 48, kind=kind, rate=25), MUCH, is_base64=False)
    assert (video.total, video.rate) == (12, 25.0)
    brightness = [int(np.asarray(picture).mean()) for picture in video.frames([0, 5, 11])]
    assert brightness == pytest.approx([45, 95, 155], abs=8)


def test_a_file_with_fewer_frames_than_it_says() -> None:
    video = decode_video(video_file(8, 64, 48), MUCH, is_base64=False)
    pictures = [picture.tobytes() for picture in video.frames([0, 7, 9])]
    assert pictures[2] == pictures[1] != pictures[0]


def test_pictures_one_by_one() -> None:
    pictures = [noise(40, 30), noise(40, 32)]
    video = decode_video(jpeg_url(pictures).split(";base64,")[1].encode(), MUCH, is_base64=True)
    assert (video.total, video.rate) == (2, None)
    assert [picture.size for picture in video.frames([0, 1])] == [(40, 30), (40, 32)]
    one = decode_video(base64.b64encode(saved(noise(8, 9), "JPEG")), MUCH, is_base64=True)
    assert [picture.size for picture in one.frames([0])] == [(8, 9)]


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"#EXTM3U\n#EXTINF:1\nhttp://127.0.0.1/a.ts\n",
        saved(noise(8, 8)),
    ],
)
def test_files_that_are_no_videos(file: bytes) -> None:
    with pytest.raises(BadRequest, match="must be one of mov,matroska,avi,mpegts,ogg"):
        decode_video(file, MUCH, is_base64=False)


def test_tags_in_another_encoding_harm_nothing() -> None:
    file = video_file(8, 64, 48, kind="matroska")
    assert decode_video(file.replace(b"ENCODER", b"\xc4NCODER"), MUCH, is_base64=False).total == 8


def test_a_codec_that_nobody_knows() -> None:
    file = video_file(8, 64, 48, kind="matroska").replace(b"V_MPEG4", b"V_ZZZZ4")
    with pytest.raises(BadRequest, match="codec that is not known"):
        decode_video(file, MUCH, is_base64=False)


def test_a_file_that_ends_early() -> None:
    with pytest.raises(BadRequest, match=r"A video (has no pictures|cannot be decoded)"):
        decode_video(video_file(8, 64, 48)[:600], MUCH, is_base64=False)


def test_frames_that_are_too_large() -> None:
    with pytest.raises(BadRequest, match="at most 3071 pixels, and this one has 64 x 48"):
        decode_video(video_file(4, 64, 48), 3071, is_base64=False)


def test_a_server_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(BadRequest, match=r"pip install av"):
        decode_video(b"\0" * 64, MUCH, is_base64=False)
