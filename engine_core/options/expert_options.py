"""Options of expert parallelism: how tokens reach experts, and which rank has which expert."""

from __future__ import annotations

from typing import TypeVar, get_args

from engine_core.config import EngineConfig
from models.config import ConfigError
from models.parallel.experts import Placement, Transport

T = TypeVar("T", bound=str)


def transport_of(config: EngineConfig) -> Transport:
    """How tokens travel. Raises ConfigError if that is unknown, or experts are not shared."""
    asked = config.all2all_backend or "allgather_reducescatter"
    return _known(
        config, "--all2all-backend", asked, get_args(Transport), usual=config.all2all_backend is None
    )


def placement_of(config: EngineConfig) -> Placement:
    """How experts are divided among ranks. Raises ConfigError if that is unknown, or they are not shared."""
    asked = config.expert_placement_strategy
    return _known(config, "--expert-placement-strategy", asked, get_args(Placement), usual=asked == "linear")


def _known(config: EngineConfig, flag: str, asked: str, choices: tuple[T, ...], *, usual: bool) -> T:
    if not usual and not config.enable_expert_parallel:
        raise ConfigError(f"{flag} {asked} goes with --enable-expert-parallel: add that, or leave it out")
    for known in choices:
        if asked == known:
            return known
    raise ConfigError(f"{flag} is '{asked}'; it can be {' or '.join(choices)}")
