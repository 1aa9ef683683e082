"""Runners of tiny checkpoints."""

from pathlib import Path
from typing import TypeVar

from sizes import worker_config

from models.config import read_config
from models.conversion.conversion_choice import Conversion
from worker.runner import Runner
from worker.steps.feature import Feature

F = TypeVar("F", bound=Feature)


def open_runner(folder: Path, **given: object) -> Runner:
    """A runner of the checkpoint in this folder, with one thread unless told otherwise."""
    fields = {"folder": str(folder), "model": read_config(folder), "cpu_threads": 1, **given}
    return Runner(worker_config(**fields), lambda phase, fraction: None)


def open_embedder(folder: Path) -> Runner:
    """A runner of an encoder, which embeds."""
    architecture = read_config(folder).architecture
    served_as = Conversion(runner="pooling", convert="embed", architecture=architecture)
    return open_runner(folder, conversion=served_as)


def feature_of(runner: Runner, kind: type[F]) -> F:
    """The feature of this class that a runner has."""
    features = runner._hooks.features  # pyright: ignore[reportPrivateUsage]
    return next(each for each in features if isinstance(each, kind))
