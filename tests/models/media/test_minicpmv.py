"""MiniCPM-V's slices, and the text around them; their pixels are in tests/worker/test_minicpmv.py."""

from typing import Any

import numpy as np
import pytest
from media_files import media_files, noise

from models.media.item import Layout, MediaError
from models.media.tiling.minicpmv import MiniCPMVProcessor, joined, slices_of
from models.plain_files import ConfigError

SETTINGS = {"image_processor_type": "MiniCPMVImageProcessor", "norm_mean": [0.5] * 3, "norm_std": [0.5] * 3}


def made(settings: dict[str, Any] | None = None, **config: Any) -> MiniCPMVProcessor:
    fields = {"version": 2.6, "query_num": 2, "vision_config": {}, **config}
    return MiniCPMVProcessor(media_files("MiniCPMV", fields, {**SETTINGS, **(settings or {})}))


def text_of(layout: Layout) -> str:
    """The text of a layout, with a # for each embedding."""
    known: list[str] = []

    def encode(text: str) -> list[int]:
        known.append(text)
        return [-len(known)]

    spelled = layout.spelled(encode)
    places = {first + index for first, length in spelled.embeddings for index in range(length)}
    shown = ["#" if place in places else known[-token - 1] for place, token in enumerate(spelled.tokens)]
    return layout.before + "".join(shown)


ONE = "<slice>##</slice>"


@pytest.mark.parametrize(
    ("size", "slices"),
    [
        ((448, 448), ""),
        ((449, 448), ONE * 2),
        ((640, 480), ONE * 2),
        ((480, 640), f"{ONE}\n{ONE}"),
        ((1600, 1200), "\n".join([ONE * 3] * 3)),
        ((1600, 900), "\n".join([ONE * 4] * 2)),
    ],
)
def test_slices_stand_in_rows_behind_the_whole(size: tuple[int, int], slices: str) -> None:
    processor = made()
    item = processor.prepare(noise(*size))
    expected = f"<image_id>{{ordinal}}</image_id><image>##</image>{slices}"
    assert text_of(processor.layout(item)) == expected
    assert item.embeddings == expected.count("#")


def test_the_first_version_has_slices_within_marks_and_no_numbers() -> None:
    processor = made(version="2.5")
    small, high = processor.prepare(noise(30, 40)), processor.prepare(noise(480, 640))
    assert text_of(processor.layout(small)) == "<image>##</image>"
    rows = "<image>##</image>\n<image>##</image>"
    assert text_of(processor.layout(high)) == f"<image>##</image><slice>{rows}</slice>"
    later = made({"use_image_id": False})
    assert text_of(later.layout(small)) == "<image>##</image>"


def test_patches_of_all_slices_lie_below_the_whole() -> None:
    whole, part = noise(42, 28), noise(28, 28)
    pixels = joined([slices_of(whole, 14, 1, 1), slices_of(part, 14, 1, 1)])
    assert pixels.shape == (56, 42, 3)
    assert np.array_equal(pixels[:28], np.asarray(whole))
    below, cells = pixels[28:], np.asarray(part)
    assert np.array_equal(below[:14], np.concatenate([cells[:14, :14], cells[:14, 14:], cells[14:, :14]], 1))
    assert np.array_equal(below[14:, :14], cells[14:, 14:])
    assert not below[14:, 14:].any()
    by_column = joined([slices_of(whole, 14, 1, 1), slices_of(part, 14, 1, 2)])[28:]
    assert np.array_equal(by_column[:14, 14:28], cells[14:, :14])


def test_strips_and_settings_that_are_not_served_are_refused() -> None:
    with pytest.raises(MediaError, match="this one has 1 x 201 pixels"):
        made().prepare(noise(1, 201))
    with pytest.raises(ConfigError, match="slice_mode"):
        made({"slice_mode": False})
    with pytest.raises(ConfigError, match="max_slice_nums"):
        made({"max_slice_nums": 99})
