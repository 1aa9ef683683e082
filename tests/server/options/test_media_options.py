"""What operators and requests may say of how files are read, and the frames that are taken because of it."""

from typing import Any

import pytest
from media_files import QWEN_CONFIG, QWEN_SETTINGS, media_files

from models.media.files import with_settings
from models.media.item import Video
from models.media.qwen_vl import Qwen3VLProcessor, QwenVLProcessor
from server.options.media_options import MediaIo, VideoIo, read_media_io
from server.options.option_parsing import OptionError
from server.options.parse_server_options import from_python


def test_later_options_override_earlier_ones_field_by_field() -> None:
    io = read_media_io({"video": {"num_frames": 8, "fps": 1}}, {"video": {"fps": 4.0}, "image": {}})
    assert io == MediaIo(video=VideoIo(num_frames=8, fps=4.0))
    assert io.video_settings == {"fps": 4.0, "min_frames": 1, "max_frames": 8}
    assert MediaIo().video_settings == {}


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, 4),
        ({"num_frames": 10}, 10),
        ({"num_frames": -1}, 60),
        ({"num_frames": 90}, 60),
        ({"fps": 10}, 20),
        ({"fps": 10, "num_frames": 6}, 6),
        ({"fps": 1, "num_frames": 60}, 2),
    ],
)
@pytest.mark.parametrize("family", [QwenVLProcessor, Qwen3VLProcessor])
def test_frames_of_two_seconds(options: dict[str, Any], taken: int, family: type[QwenVLProcessor]) -> None:
    files = media_files(
        "Qwen2VLForConditionalGeneration", {**QWEN_CONFIG, "image_token_id": 9}, QWEN_SETTINGS
    )
    processor = family(with_settings(files, read_media_io({"video": options}).video_settings))
    video = Video(60, 30.0, lambda numbers: iter(()))
    settings = processor.video_settings
    assert len(processor._taken(video.total, 30.0, settings.max_frames)) == taken  # pyright: ignore[reportPrivateUsage]


def test_operators_are_told_what_there_is() -> None:
    options = {"image": {"rgba_background_color": [0, 0, 0]}}
    assert from_python({"model": "demo", "media_io_kwargs": options}).media.media_io_kwargs == options
    with pytest.raises(OptionError, match=r"media_io_kwargs: .*`mode`.*; there are image.rgba_background"):
        from_python({"model": "demo", "media_io_kwargs": {"image": {"mode": "L"}}})
