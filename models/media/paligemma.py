"""PaliGemma and ColPali: a picture of one size, each of whose patches becomes a token ahead of the text."""

from __future__ import annotations

import msgspec

from models.media.files import MediaFiles, read_facts
from models.media.fixed_size import SIGLIP, FixedSize
from models.media.item import Layout, Picture, Prepared


class _Facts(msgspec.Struct, frozen=True):
    image_token_index: int = 256_000


class PaliGemmaProcessor:
    placeholder = written = "<image>"

    def __init__(self, files: MediaFiles) -> None:
        self._size = FixedSize(files, {"SiglipImageProcessor": SIGLIP})
        self.settings = self._size.settings
        self._token = read_facts(files, _Facts).image_token_index

    def prepare(self, picture: Picture) -> Prepared:
        return self._size.prepare(picture, self._size.patches)

    def layout(self, prepared: Prepared) -> Layout:
        return Layout([self._token] * prepared.embeddings, [(0, prepared.embeddings)])


class ColPaliProcessor(PaliGemmaProcessor):
    """Pages for search, each of which is a prompt of its own: no chat template writes it."""

    written = "<image><bos>Describe the image.\n"
