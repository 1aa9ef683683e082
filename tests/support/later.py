"""Packages that are imported when a test first uses them, for every process of tests collects all files."""

from importlib import import_module
from typing import Any


class Later:
    """Stands for a module whose import takes seconds."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks everything in a file whether it is a fixture
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
