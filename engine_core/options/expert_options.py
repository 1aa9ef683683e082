"""Options of expert parallelism: how tokens reach experts, and how experts move by load."""

from __future__ import annotations

from typing import get_args

import msgspec

from engine_core.config import EngineConfig
from models.config import ConfigError
from models.parallel.experts import Transport
from worker.config import Balancing

_OWN_OPTION = "show_load"
"""The field of Balancing that is no key of --eplb-config."""


def transport_of(config: EngineConfig) -> Transport:
    """How tokens travel. Experts that may move need results that return one by one."""
    asked = config.all2all_backend or ("all_to_all" if config.enable_eplb else "allgather_reducescatter")
    for known in get_args(Transport):
        if asked == known:
            return known
    raise ConfigError(f"--all2all-backend is '{asked}'; it can be {' or '.join(get_args(Transport))}")


def balancing_of(config: EngineConfig) -> Balancing | None:
    """How experts are moved by load, if they are. Raises ConfigError if options contradict each other."""
    if not config.enable_expert_parallel:
        for flag, is_given in (
            (f"--all2all-backend {config.all2all_backend}", config.all2all_backend is not None),
            ("--enable-eplb", config.enable_eplb),
        ):
            if is_given:
                raise ConfigError(f"{flag} goes with --enable-expert-parallel: add that, or leave it out")
    transport = transport_of(config)
    if not config.enable_eplb:
        for flag, is_given in (
            ("--eplb-config", bool(config.eplb_config)),
            ("--show-expert-load", config.show_expert_load),
        ):
            if is_given:
                raise ConfigError(f"{flag} goes with --enable-eplb: add that, or leave it out")
        return None
    if transport != "all_to_all":
        raise ConfigError(
            f"--enable-eplb does not go with --all2all-backend {config.all2all_backend}: a rank's sum "
            "depends on which experts it holds, so answers would change when they move; leave that out"
        )
    balancing = _read(config)
    if balancing.num_redundant_experts and config.expert_placement_strategy != "linear":
        raise ConfigError(
            f"--expert-placement-strategy {config.expert_placement_strategy} does not go with "
            "num_redundant_experts: leave one of them out"
        )
    return balancing


def _read(config: EngineConfig) -> Balancing:
    known = [name for name in Balancing.__struct_fields__ if name != _OWN_OPTION]
    for key in config.eplb_config:
        if key not in known:
            raise ConfigError(f"--eplb-config: there is no {key}; there are {', '.join(known)}")
    try:
        given = {**config.eplb_config, _OWN_OPTION: config.show_expert_load}
        return msgspec.convert(given, Balancing, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--eplb-config: {error}") from error
