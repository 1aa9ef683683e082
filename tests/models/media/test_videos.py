"""What of a video is taken for a model of the Qwen-VL kind, and what stands for it in a prompt.

The very pixels cannot be compared: transformers resizes frames by torchvision, which is not needed here.
"""

import random
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from media_files import QWEN_CONFIG, QWEN_SETTINGS
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor as TheirQwen3
from transformers.models.smolvlm import processing_smolvlm
from transformers.video_utils import VideoMetadata, default_sample_indices_fn
from video_files import noisy_video

from models.media.files import MediaFiles
from models.media.item import Layout, MediaError, Video, VideoProcessor
from models.media.registry import make_processor
from models.media.tiling.idefics3 import _spelled  # pyright: ignore[reportPrivateUsage]
from models.plain_files import ConfigError

FPS = {"min_frames": 4, "max_frames": 768, "fps": 2, "num_frames": None, "temporal_patch_size": 2}
MUCH = 1 << 30


def of_transformers(name: str) -> Any:
    """A module that imports torchvision, though what is called here does without."""
    names = ["torchvision", *(f"torchvision.transforms{end}" for end in ("", ".v2", ".v2.functional"))]
    with mock.patch.dict(sys.modules, {each: ModuleType(each) for each in names}):
        return import_module(f"transformers.models.{name}.video_processing_{name}")


qwen2, qwen3 = of_transformers("qwen2_vl"), of_transformers("qwen3_vl")


def processor(architecture: str, **videos: Any) -> VideoProcessor:
    config = {**QWEN_CONFIG, "video_token_id": 9}
    made = make_processor(MediaFiles(architecture, config, QWEN_SETTINGS, {**QWEN_SETTINGS, **videos}))
    assert isinstance(made, VideoProcessor)
    return made


QWEN2 = processor("Qwen2VLForConditionalGeneration")
QWEN25 = processor("Qwen2_5_VLForConditionalGeneration")
QWEN3 = processor("Qwen3VLForConditionalGeneration", min_pixels=4096, max_pixels=28 * 28 * 4000)


def test_frames_are_those_that_transformers_takes() -> None:
    rng = random.Random(3)
    for _ in range(500):
        total, rate = rng.randrange(2, 4000), rng.choice([1, 2, 7.5, 23.976, 24, 25, 29.97, 30, 60])
        metadata: Any = VideoMetadata(total_num_frames=total, fps=rate)
        for ours, theirs in ((QWEN2, qwen2.Qwen2VLVideoProcessor), (QWEN3, qwen3.Qwen3VLVideoProcessor)):
            given: Any = SimpleNamespace(**FPS)
            wanted = theirs.sample_frames(given, metadata=metadata, fps=2)
            taken = ours._taken(total, rate, 768)  # pyright: ignore
            # Their steps may be rounded so that a frame behind the last one is asked for.
            assert wanted.tolist() in (taken, [*taken, total])
    assert QWEN2._taken(1, 30.0, 768) == [0]  # pyright: ignore


def test_sizes_are_those_of_transformers() -> None:
    rng = random.Random(5)
    for _ in range(1000):
        width, height, frames = rng.randrange(14, 2500), rng.randrange(14, 1500), rng.randrange(2, 60)
        high, wide = qwen2.smart_resize(height, width, 28, 3136, 1_003_520)
        assert QWEN2._frame_size((width, height), frames) == (wide, high)  # pyright: ignore
        high, wide = qwen3.smart_resize(frames, height, width, 2, 28, 4096, 28 * 28 * 4000)
        assert QWEN3._frame_size((width, height), frames) == (wide, high)  # pyright: ignore


def test_a_video_in_one_run_that_knows_its_time() -> None:
    video = noisy_video(20, 100, 60, rate=5.0)
    prepared = QWEN25.prepare_video(video, 768, MUCH)
    assert (prepared.kind, prepared.grid, prepared.shape) == ("video", (4, 4, 8), (8 * 56, 112, 3))
    assert len(prepared.pixels) == 8 * 56 * 112 * 3
    metadata = VideoMetadata(total_num_frames=20, fps=5.0, frames_indices=[*range(8)])
    assert prepared.interval == 4.0 * (2 / metadata.sampled_fps)
    assert QWEN2.prepare_video(video, 768, MUCH).interval == 1.0
    layout = QWEN25.layout(prepared)
    assert (layout.tokens, layout.embeddings) == ([9] * 32, [(0, 32)])


def test_times_stand_before_frames() -> None:
    prepared = QWEN3.prepare_video(noisy_video(21, 100, 60, rate=5.0), 5, MUCH)
    wanted = TheirQwen3._calculate_timestamps(None, [0, 5, 10, 15, 20], 5.0)  # pyright: ignore
    assert list(prepared.seconds) == wanted == [0.5, 2.5, 4.0]
    assert prepared.grid[0] == 3
    pixels = bytes(prepared.pixels)
    frame = len(pixels) // 6
    assert pixels[-frame:] == pixels[-2 * frame : -frame] != pixels[:frame]
    layout = QWEN3.layout(prepared)
    assert layout.before == "<0.5 seconds>"
    names = {"<|vision_start|>": 1, "<|vision_end|>": 2}

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for piece in text.replace(">", ">\n").split():
            ids += [names[piece]] if piece in names else [100] if "<" in piece else [101]
        return ids

    spelled = layout.spelled(encode)
    size = prepared.embeddings // 3
    between = [2, 100, 101, 1]
    assert spelled.tokens == [1, *[9] * size, *between, *[9] * size, *between, *[9] * size, 2]
    assert [length for _, length in spelled.embeddings] == [size] * 3
    assert all(spelled.tokens[first] == 9 for first, _ in spelled.embeddings)


def test_pictures_without_a_rate_are_all_taken() -> None:
    for each in (QWEN2, QWEN3):
        assert each.prepare_video(noisy_video(6, 60, 60), 768, MUCH).seconds == (0.25, 1.25, 2.25)
    assert QWEN2.prepare_video(noisy_video(1, 60, 60), 768, MUCH).grid[0] == 1


INTERN_SETTINGS = {"size": {"height": 28, "width": 28}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def internvl(**videos: Any) -> VideoProcessor:
    config = {"vision_config": {"image_size": 28, "patch_size": 7}, "image_token_id": 9}
    files = MediaFiles(
        "InternVLForConditionalGeneration",
        config,
        {**INTERN_SETTINGS, "resample": 3},
        {**INTERN_SETTINGS, **videos},
    )
    made = make_processor(files)
    assert isinstance(made, VideoProcessor)
    return made


def test_frames_of_internvl_are_tiles_behind_their_numbers() -> None:
    theirs = of_transformers("internvl").InternVLVideoProcessor
    rng = random.Random(4)
    for _ in range(300):
        total, count = rng.randrange(40, 4000), rng.randrange(1, 40)
        given: Any = SimpleNamespace(num_frames=count, initial_shift=True)
        wanted = theirs.sample_frames(given, metadata=VideoMetadata(total_num_frames=total, fps=25))
        frames = mock.Mock(side_effect=noisy_video(total, 9, 9).frames)
        internvl(num_frames=count).prepare_video(Video(total, 25.0, frames), 768, MUCH)
        assert frames.call_args.args[0] == wanted.tolist()[:count]
    video = noisy_video(100, 60, 40, rate=25.0)
    prepared = internvl(min_frames=2, fps=0.75).prepare_video(video, 768, MUCH)
    assert (prepared.kind, prepared.grid, prepared.shape) == ("video", (3, 4, 4), (3 * 28, 28, 3))
    frames = [frame.resize((28, 28), 3).tobytes() for frame in video.frames([16, 50, 83])]
    assert bytes(prepared.pixels) == b"".join(frames)
    layout = internvl().layout(prepared)
    wanted = "\n".join(f"Frame{number}: <img>{'x' * 4}</img>" for number in (1, 2, 3))
    assert as_text(layout) == wanted
    assert [length for _, length in layout.embeddings] == [4, 4, 4]
    assert internvl().prepare_video(video, 768, MUCH).grid[0] == 8
    assert internvl().prepare_video(video, 5, MUCH).grid[0] == 5
    with pytest.raises(MediaError, match="may become 31 tokens at most, and this one becomes 32"):
        internvl().prepare_video(video, 768, 31)


SMOL_SETTINGS = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}, "resample": 1}


def smolvlm(**videos: Any) -> VideoProcessor:
    config = {"vision_config": {"image_size": 32, "patch_size": 8}, "image_token_id": 9, "scale_factor": 2}
    settings = {**INTERN_SETTINGS, **SMOL_SETTINGS}
    files = MediaFiles("SmolVLMForConditionalGeneration", config, settings, {**settings, **videos})
    made = make_processor(files)
    assert isinstance(made, VideoProcessor)
    return made


def as_text(layout: Layout) -> str:
    """The text of a layout, in which an x is an embedding."""
    spelled = layout.spelled(lambda text: [1000 + ord(each) for each in text])
    text = "".join("x" if token == 9 else chr(token - 1000) for token in spelled.tokens)
    return f"{spelled.before}{text}{spelled.after}"


def test_frames_of_smolvlm_are_those_of_transformers_behind_their_times() -> None:
    theirs: Any = of_transformers("smolvlm").SmolVLMVideoProcessor.sample_frames
    rng = random.Random(6)
    for _ in range(300):
        total, rate, most = rng.randrange(2, 9000), rng.choice([7.5, 24, 29.97]), rng.randrange(1, 70)
        fps = rng.choice([0.5, 1, 2])
        given = SimpleNamespace(num_frames=most, fps=fps)
        metadata = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
        ours: Any = smolvlm(video_sampling={"max_frames": most, "fps": fps})
        assert ours._taken(total, rate, MUCH) == theirs(given, metadata=metadata).tolist()
    prepared = smolvlm(max_frames=3).prepare_video(noisy_video(100, 60, 40, rate=1.25), 768, MUCH)
    assert (prepared.kind, prepared.grid, prepared.shape) == ("video", (3, 4, 4), (96, 32, 3))
    names = {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}
    metadata = VideoMetadata(total_num_frames=100, fps=1.25, duration=80.0, frames_indices=[1, 49, 98])
    own: Any = SimpleNamespace(**names, image_token="x", image_seq_len=4)
    with mock.patch.object(processing_smolvlm, "num2words", lambda number: "three"):
        inputs = {"pixel_values": np.zeros((1, 3)), "video_metadata": [metadata]}
        wanted = processing_smolvlm.SmolVLMProcessor.replace_video_token(own, inputs, 0)
    assert as_text(smolvlm().layout(prepared)) == wanted
    assert [_spelled(number) for number in (7, 19, 64, 90, 100, 768, 1001, 12_000)] == [
        *("seven", "nineteen", "sixty-four", "ninety", "one hundred", "seven hundred and sixty-eight"),
        *("one thousand and one", "twelve thousand"),
    ]


def test_frames_of_onevision_lie_evenly() -> None:
    tower = {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 4}
    config: dict[str, object] = {"vision_config": tower}
    settings = {**INTERN_SETTINGS, "resample": 3, "image_grid_pinpoints": [[28, 56]]}
    files = MediaFiles(
        "LlavaOnevisionForConditionalGeneration", config, settings, {**settings, "max_frames": 4}
    )
    made = make_processor(files)
    assert isinstance(made, VideoProcessor)
    frames = mock.Mock(side_effect=noisy_video(11, 9, 9).frames)
    prepared = made.prepare_video(Video(11, 25.0, frames), 768, MUCH)
    metadata = VideoMetadata(total_num_frames=11, fps=25)
    wanted = default_sample_indices_fn(metadata=metadata, num_frames=4)
    assert frames.call_args.args[0] == wanted.tolist()
    assert (prepared.grid, prepared.embeddings) == ((4, 7, 7), 4 * 16 + 1)
    assert made.layout(prepared).tokens == [151_647] * 65
    with pytest.raises(MediaError, match="may become 63 tokens at most, and this one becomes 64"):
        made.prepare_video(Video(11, 25.0, frames), 768, 64)


def test_what_cannot_be_prepared() -> None:
    with pytest.raises(MediaError, match="may become 31 tokens at most, and this one becomes 32"):
        QWEN25.prepare_video(noisy_video(20, 100, 60, rate=5.0), 768, 31)
    with pytest.raises(MediaError, match="200 times"):
        QWEN2.prepare_video(noisy_video(4, 1000, 4), 768, MUCH)
    with pytest.raises(ConfigError, match="'image_mean' must be that of"):
        files = MediaFiles(
            "Qwen2VLForConditionalGeneration",
            QWEN_CONFIG,
            {**QWEN_SETTINGS, "image_mean": [0.5, 0.5, 0.5]},
            {"image_mean": [0.1, 0.5, 0.5]},
        )
        make_processor(files)
