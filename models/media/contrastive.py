"""CLIP and SigLIP, whose pictures are compared with texts: a picture is a prompt of its own, of one position.

SigLIP 2 in fixed resolutions has the classes of SigLIP.
"""

from __future__ import annotations

from models.media.files import MediaFiles
from models.media.fixed_size import CLIP, SIGLIP, FixedSize
from models.media.item import Layout, Picture, Prepared

_DEFAULTS = {
    "CLIPModel": {"CLIPImageProcessor": CLIP},
    "SiglipModel": {"SiglipImageProcessor": SIGLIP},
}


class ContrastiveProcessor:
    placeholder = written = ""

    def __init__(self, files: MediaFiles) -> None:
        self._size = FixedSize(files, _DEFAULTS[files.architecture])
        self.settings = self._size.settings

    def prepare(self, picture: Picture) -> Prepared:
        return self._size.prepare(picture, 1)

    def layout(self, prepared: Prepared) -> Layout:
        return Layout([0], [(0, 1)])
