"""Videos for tests, made by PyAV, and what transformers' models take of prepared ones."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from typing import Any

import av
import numpy as np
import torch
from media_files import noise, saved
from PIL.Image import Image, fromarray

from models.media.files import PictureSettings
from models.media.item import Prepared, Video


def video_file(frames: int, width: int, height: int, *, rate: int = 4, kind: str = "mp4") -> bytes:
    """A video in which a bright field goes from left to right."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            pixels = np.full((height, width, 3), 40 + 5 * number, np.uint8)
            pixels[:, : (number + 1) * width // frames] += 60
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def data_url(file: bytes) -> str:
    return "data:video/mp4;base64," + base64.b64encode(file).decode()


def jpeg_url(pictures: Sequence[Image]) -> str:
    """The form in which vLLM's clients send frames one by one."""
    files = [base64.b64encode(saved(picture, "JPEG")).decode() for picture in pictures]
    return "data:video/jpeg;base64," + ",".join(files)


def noisy_video(total: int, width: int, height: int, rate: float | None = None) -> Video:
    def frames(numbers: Sequence[int]) -> Iterator[Image]:
        pixels = np.asarray(noise(width, height))
        return (fromarray(np.roll(pixels, number, axis=1)) for number in numbers)

    return Video(total, rate, frames)


def patches(prepared: Prepared, settings: PictureSettings, patch: int, merge: int = 2) -> dict[str, Any]:
    """The pixels and the grid of a prepared video as transformers' processors give them."""
    times, rows, columns = prepared.grid
    height, width = rows * patch, columns * patch
    pixels = np.asarray(prepared.pixels).reshape(times, 2, height, width, 3).astype(np.float32)
    normal = (pixels / 255 - np.float32(settings.image_mean)) / np.float32(settings.image_std)
    cut = normal.reshape(times, 2, rows // merge, merge, patch, columns // merge, merge, patch, 3)
    ordered = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(times * rows * columns, -1)
    return {
        "pixel_values_videos": torch.from_numpy(ordered.copy()),
        "video_grid_thw": torch.tensor([prepared.grid]),
    }
