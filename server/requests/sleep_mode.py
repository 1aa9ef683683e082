"""Checks of what operators ask when they put a model to sleep, or wake it."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.config import EngineConfig
from server.errors import BadRequest, Forbidden

_LEVELS = ("1", "2")
_TAGS = {"weights", "kv_cache"}


def sleep_level(given: object, config: EngineConfig) -> int:
    """Returns the level of sleep that is asked for; raises an error if there is none such, or no sleep."""
    if not config.enable_sleep_mode:
        raise Forbidden("This model was not started with --enable-sleep-mode, and never sleeps.")
    if str(given) not in _LEVELS:
        raise BadRequest(
            "`level` is 1, which leaves the checkpoint in the system's cache of files, or 2, which has it "
            f"dropped from there; got {str(given)[:32]!r}.",
            "level",
        )
    return int(str(given))


def check_tags(tags: Sequence[str] | None) -> None:
    """Refuses to wake a part of the model alone."""
    if tags and set(tags) != _TAGS:
        raise BadRequest("`tags`: weights and KV cache wake together here: leave it out.", "tags")
