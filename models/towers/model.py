"""Models of text and pictures: the class of a text, composed with a tower."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.composites import COMPOSITES
from models.config import ConfigError
from models.media.files import has_files, read_files
from models.media.registry import make_processor
from models.model import ModelSetup
from models.parallel.rank_shares import layers_of
from models.towers.tower import Tower, TowerInput, TowerSetup, finish

logger = logging.getLogger(__name__)


def with_tower_of(text_class: type, architecture: str, folder: Path, *, text_only: bool) -> type:
    """Compose a composite's text with its tower, if there is a class for that, and settings of pictures."""
    composite = COMPOSITES.get(architecture)
    if composite is None or not composite.tower:
        return text_class
    module, _, name = composite.tower.partition(":")
    tower_class: type = getattr(import_module(f"models.towers.{module}"), name)
    if not text_only and has_files(folder):
        return with_tower(text_class, tower_class)
    if getattr(tower_class, "sees_prompt", False):
        raise ConfigError(
            f"{architecture} is not served for text alone: it needs preprocessor_config.json, and a limit of "
            "pictures (--limit-mm-per-prompt) above 0"
        )
    if not text_only:
        logger.warning("%s does not say how pictures are prepared (preprocessor_config.json)", folder)
    return text_class


@cache
def with_tower(text_class: type, tower_class: type) -> type:
    """Make a class that computes text as `text_class` does, and encodes media by a `tower_class`."""
    own = {"tower_class": tower_class, "__module__": text_class.__module__}
    return type(text_class.__name__, (_WithTower, text_class), own)


def find_tower(model: object) -> Tower | None:
    """What encodes media for a model, as it is served; None if the model has text only."""
    base: Any = getattr(model, "base", model)
    return getattr(base, "tower", base if hasattr(base, "levels") else None)


def transcribes(model: object) -> bool:
    """Whether answers to conversations with sounds may be what is said in them."""
    return getattr(getattr(model, "base", model), "transcribes", False)


class _WithTower(nn.Module):
    """Adds a tower to the class of a text model, which comes behind this one among the bases."""

    tower_class: ClassVar[type]

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(setup)
        config, parallel = setup.config, setup.parallel
        whole = config.whole or config.raw
        processor = make_processor(read_files(setup.folder, config.architecture, whole))
        self.transcribes = bool(getattr(processor, "transcribes", False))
        sizes = {"hidden_size": config.hidden_size, "dtype": setup.dtype}
        self.tower = self.tower_class(TowerSetup(config=whole, pictures=processor.settings, **sizes))
        self._beside = () if parallel.first else COMPOSITES[config.architecture].beside
        fewest = len(layers_of(0, parallel.stages, config.num_layers))
        if fewest < self.tower.levels:
            raise ConfigError(
                f"--pipeline-parallel-size: the first stage would have {fewest} layers, and pictures add to "
                f"what the first {self.tower.levels} of {config.architecture} give: use fewer stages"
            )

    def pull(self, weights: Weights) -> None:
        text: Any = super()
        text.pull(weights)
        if self._beside:
            weights.at("").ignore(*self._beside)
        else:
            load(self.tower, weights)

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        return finish(self.tower.encode(items))
