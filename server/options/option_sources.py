"""Readers of option values beside the command line: variables, a YAML file, and keywords of Python."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import get_args

from server.options.argument_errors import nearest
from server.options.option_parsing import Option, OptionError, VllmFlag, plain_type

_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(TCP|UDP|SCTP)\w*)$")


def from_environment(
    options: Sequence[Option], environ: Mapping[str, str], prefix: str, others: Sequence[str] = ()
) -> dict[str, object]:
    """Read variables named prefix + FLAG, in capitals with underscores. The caller reads `others`."""
    by_name = {prefix + option.field.upper(): option for option in options}
    found: dict[str, object] = {}
    for name, text in environ.items():
        if not name.startswith(prefix) or name in others or is_kubernetes_link(name, text):
            continue
        if name not in by_name:
            near = nearest(name, [*by_name, *others])
            raise OptionError(f"environment: {name} is not an option of this server{near}")
        found[by_name[name].field] = by_name[name].value(text, f"environment variable {name}")
    return found


def is_kubernetes_link(name: str, text: str) -> bool:
    """Whether Kubernetes sets such a variable in containers beside a service, whose name begins it."""
    return _LINK.search(name) is not None or text.startswith(("tcp://", "udp://"))


def from_file(
    options: Sequence[Option], vllm_flags: Sequence[VllmFlag], path: Path, without_effect: list[VllmFlag]
) -> dict[str, object]:
    """Read a YAML file of flags without their dashes; `without_effect` gets those that change nothing."""
    import yaml  # slow, and needed only for a file

    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise OptionError(f"--config {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise OptionError(f"--config {path} must hold 'option: value' lines")
    return read_fields(options, vllm_flags, _undotted(content), str(path), without_effect)


def _undotted(content: Mapping[object, object]) -> dict[str, object]:
    """Gathers keys with dots, such as hf-overrides.rope_theta, in the object whose parts they give."""
    whole = {str(key): given for key, given in content.items() if "." not in str(key)}
    for key, given in content.items():
        head, *path = str(key).split(".")
        if path:
            part = reduce(lambda inner, name: {name: inner}, reversed(path), given)
            whole[head] = _merged(whole.get(head), part)
    return whole


def _merged(known: object, more: object) -> object:
    if not (isinstance(known, dict) and isinstance(more, dict)):
        return more
    return {**known, **{name: _merged(known.get(name), given) for name, given in more.items()}}


def read_fields(
    options: Sequence[Option],
    vllm_flags: Sequence[VllmFlag],
    content: Mapping[str, object],
    where: str,
    without_effect: list[VllmFlag],
) -> dict[str, object]:
    """Read flags without their dashes, and their values, of a file; errors begin with `where`."""
    by_name = _by_name(options)
    unsupported = {other.keyword: other for other in vllm_flags}
    found: dict[str, object] = {}
    for key, given in content.items():
        field = str(key).lstrip("-").replace("-", "_")
        switch = by_name.get(field.removeprefix("no_"))
        if field not in by_name and switch and plain_type(switch.type) is bool:
            field, given = switch.field, False if given is True else None  # as vLLM reads such a key
        if field in unsupported:
            unsupported[field].take(given, without_effect)
        elif field in by_name:
            option = by_name[field]
            if given is not None or type(None) in get_args(option.type):
                found[option.field] = option.value(given, f"{where}: {key}")
        else:
            raise OptionError(f"{where}: there is no option {key}{nearest(field, by_name)}")
    return found


def _by_name(options: Sequence[Option]) -> dict[str, Option]:
    """Each option by its field, and by the second of its names, if that is a word too."""
    shorts = {option.doc.short: option for option in options if option.doc.short.startswith("--")}
    words = {short[2:].replace("-", "_"): option for short, option in shorts.items()}
    return words | {option.field: option for option in options}


def from_keywords(
    options: Sequence[Option], vllm_flags: Sequence[VllmFlag], keywords: Mapping[str, object]
) -> dict[str, object]:
    """Read keyword arguments of a Python call; None is an option that was not given."""
    by_name = _by_name(options)
    unsupported = {other.keyword: other for other in vllm_flags}
    found: dict[str, object] = {}
    for name, given in keywords.items():
        field = name.replace("-", "_")
        if field not in by_name and field not in unsupported:
            meant = nearest(field, by_name, "they are those of `serve`")
            raise OptionError(f"there is no option {name}{meant}")
        if given is None:
            continue
        if field in by_name:
            found[by_name[field].field] = by_name[field].value(_written(by_name[field], given), field)
        else:
            unsupported[field].check(given)
    return found


def _written(option: Option, given: object) -> object:
    """Bring a Python value to the form that a file has: lists, text for a path, a torch.dtype or a class."""
    given = _written_class(given)
    if option.is_list and isinstance(given, str):
        return [given]
    if option.is_list and isinstance(given, list | tuple | set | frozenset):
        return [_written_class(each) for each in given]
    return str(given) if plain_type(option.type) is str else given


def _written_class(given: object) -> object:
    """The name of a class, by which a worker imports it; anything else as it is."""
    return f"{given.__module__}:{given.__qualname__}" if isinstance(given, type) else given
