"""Finds the modules of an adapter in its base.

They have the names of the class in which the adapter was trained, which may begin otherwise than those of
the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from models.lora_config import AdapterError
from models.plain_files import shown

_MOST_SHOWN = 3


class Places:
    """The scopes of a checkpoint in which modules of an adapter may be."""

    def __init__(self, scopes: Iterable[str]) -> None:
        self._scopes = set(scopes)
        self._ends: dict[str, set[str]] = {}
        for scope in self._scopes:
            for end in _ends_of(scope):
                self._ends.setdefault(end, set()).add(scope)

    def find(self, module: str) -> str | None:
        """The scope of a module: that of its name, or the only one with which its name or its own ends."""
        if module in self._scopes:
            return module
        for end in _ends_of(module):
            if end in self._scopes:
                return end
            found = self._ends.get(end, ())
            if len(found) == 1:
                return next(iter(found))
            if found:
                return None
        return None

    def refuse(self, folder: Path, modules: Iterable[str]) -> AdapterError:
        """The error that names modules which were not found, and what is near them."""
        missing = sorted(set(modules))
        near = [name for module in missing for name in get_close_matches(module, self._scopes, 1, 0.5)]
        meant = f"; near it is {shown(near[0])}" if near else ""
        names = ", ".join(map(shown, missing[:_MOST_SHOWN]))
        others = f" and {len(missing) - _MOST_SHOWN} more" if len(missing) > _MOST_SHOWN else ""
        return AdapterError(
            f"{folder}: the model has no layer for {names}{others} of the adapter{meant}: serve the base on "
            "which it was trained. If it is this one, such layers take no adapters here: merge it (PEFT's "
            "merge_and_unload) and serve the result"
        )


def ends_cut_off(module: str) -> list[str]:
    """The names of all modules in which one lies."""
    parts = module.split(".")
    return [".".join(parts[:stop]) for stop in range(1, len(parts))]


def _ends_of(name: str) -> list[str]:
    """A name, and what is left without its first parts, as long as that still has several."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(max(1, len(parts) - 1))]
