"""Classes that a program registers, how other processes get them, and code that operators name or install."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

_LOADER = "--load-format "
"""The beginning of the names under which loaders are registered beside architectures."""

_classes: dict[str, type | str] = {}

_log = logging.getLogger(__name__)

T = TypeVar("T", bound=type)


class Registrations(msgspec.Struct, frozen=True):
    """The classes that a process has registered, in a form that another process can use."""

    classes: dict[str, str] = {}
    """Architecture, or `--load-format` and its value -> "module:Class"."""
    search_path: list[str] = []
    """Folders in which the registering process looks for modules."""


def register_model(model_arch: str, model_cls: type | str) -> None:
    """Serve the architecture `model_arch` with a class, given itself or as "module:Class".

    Several processes (ranks, or an engine of its own) import the class one by one, so for them it must stand
    at the top level of a module that is not the main program.
    """
    if isinstance(model_cls, str):
        module, colon, name = model_cls.partition(":")
        if not (module and colon and name):
            raise ValueError(f"{model_cls!r} does not name a class; write it as 'module:Class'")
    elif not isinstance(model_cls, type):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"model_cls is a class or 'module:Class', not {model_cls!r}")
    _classes[model_arch] = model_cls


def register_model_loader(load_format: str) -> Callable[[T], T]:
    """Decorates a class that reads checkpoints for `--load-format` of this name (docs/plugins.md)."""

    def register(loader: T) -> T:
        register_model(_LOADER + load_format, loader)
        return loader

    return register


def model_loader(load_format: str) -> type | None:
    """The class that is registered for this format. Raises ValueError if it cannot be imported."""
    found = _classes.get(_LOADER + load_format)
    return None if found is None else load(_LOADER + load_format, found)


def registered() -> dict[str, type | str]:
    """The classes of models by their architectures."""
    return {name: one for name, one in _classes.items() if not name.startswith(_LOADER)}


@cache
def load_general_plugins(names: str) -> None:
    """Call the functions of installed distributions that the variable `VLLM_PLUGINS` names, once.

    They register what they bring, which the processes that this one starts are told. One that cannot be used
    is told in the log, and changes nothing.
    """
    found = {entry.name: entry for entry in entry_points(group="vllm.general_plugins")}
    for name in sorted({name.strip() for name in names.split(",")} - {""}):
        try:
            found[name].load()()
        except KeyError:
            _log.warning("VLLM_PLUGINS: no installed distribution has a plug-in named %s", name)
        except Exception as error:
            _log.warning("VLLM_PLUGINS: %s cannot be used: %s: %s", name, type(error).__name__, error)


def registrations() -> Registrations:
    """Everything that was registered here, to be sent to a process that this one starts."""
    if not _classes:
        return Registrations()
    named = {
        name: one if isinstance(one, str) else f"{one.__module__}:{one.__qualname__}"
        for name, one in _classes.items()
    }
    return Registrations(named, [folder or os.getcwd() for folder in sys.path])


def use_registrations(given: Registrations) -> None:
    """Register in this process what another one has registered."""
    for folder in given.search_path:
        if folder not in sys.path:
            sys.path.append(folder)  # behind our own packages, which have common names
    _classes.update(given.classes)


def load(architecture: str, model_cls: type | str) -> type:
    """Import the class. Raises ValueError with the remedy if there is none of this name."""
    if isinstance(model_cls, type):
        return model_cls
    module, _, name = model_cls.partition(":")
    try:
        found = attrgetter(name)(import_module(module))
    except (ImportError, AttributeError) as error:
        why = f"cannot be imported: {error}"
        if module == "__main__" or "<locals>" in name:
            why = "other processes cannot import: define it at the top level of a module of its own"
        raise ValueError(f"{architecture} is registered with the class {model_cls}, which {why}") from error
    if not isinstance(found, type):
        raise ValueError(f"{architecture} is registered with {model_cls}, which is not a class")
    return found


def load_plugin(flag: str, name: str) -> Any:
    """Import what an operator has named, as "module:Name" or "module.Name". Raises ValueError."""
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if not (module and attribute):
        raise ValueError(f"{flag} {name}: write it as module:Name, with a module that Python can import")
    try:
        return attrgetter(attribute)(import_module(module))
    except Exception as error:
        raise ValueError(f"{flag} {name} cannot be imported: {type(error).__name__}: {error}") from error
