"""Options of expert parallelism: how tokens reach experts."""

from __future__ import annotations

from typing import get_args

from engine_core.config import EngineConfig
from models.config import ConfigError
from models.parallel.experts import Transport


def transport_of(config: EngineConfig) -> Transport:
    """How tokens travel. Raises ConfigError if that is unknown, or experts are not shared."""
    asked = config.all2all_backend or "allgather_reducescatter"
    if config.all2all_backend is not None and not config.enable_expert_parallel:
        raise ConfigError(
            f"--all2all-backend {asked} goes with --enable-expert-parallel: add that, or leave it out"
        )
    for known in get_args(Transport):
        if asked == known:
            return known
    raise ConfigError(f"--all2all-backend is '{asked}'; it can be {' or '.join(get_args(Transport))}")
