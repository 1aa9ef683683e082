"""Joins the page's scripts that start with it, so that a browser asks for one file and not for each module.

Modules stay modules: each becomes a function that is called once and returns what it exports. What is loaded
later imports from the old addresses, where a line hands the same exports on.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

_IMPORT = re.compile(r'^import \{(.*)\} from "(\.[^"]+)";$', re.MULTILINE)
_LATER = re.compile(r'import\("(\.[^"]+)"\)')
_EXPORT = re.compile(r"^export (?=(?:(?:async )?function\*?|class|const) (\w+))", re.MULTILINE)

_LEFT = re.compile(r"""^\s*(?:import|export)\b.*|import\((?!"\./).*""", re.MULTILINE)
"""What would be an error in a browser, since it stands in a function, or names a place that has moved."""


def join_scripts(scripts: dict[str, str], name: str) -> dict[str, str]:
    """Returns the files that take the places of a script and of all that it imports as it starts.

    `scripts`: all scripts by path. `name`: a script of the root folder.
    """
    order = list(_modules(scripts, name, set()))
    numbers = {path: f"m{number}" for number, path in enumerate(order)}
    joined = "".join(_as_function(path, scripts[path], numbers) for path in order)
    found = {name: f"{joined}export {{ {', '.join(numbers.values())} }};\n"}
    for path in order[:-1]:
        root = posixpath.relpath(name, posixpath.dirname(path) or ".")
        root = root if root.startswith(".") else f"./{root}"
        names = ", ".join(_EXPORT.findall(scripts[path]))
        module = numbers[path]
        found[path] = f'import {{ {module} }} from "{root}";\nexport const {{ {names} }} = {module};\n'
    return found


def _modules(scripts: dict[str, str], path: str, seen: set[str]) -> Iterator[str]:
    """Yields the scripts that one imports, each behind its own imports, and then the script."""
    seen.add(path)
    for _, imported in _IMPORT.findall(scripts[path]):
        if (found := _resolved(path, imported)) not in seen:
            yield from _modules(scripts, found, seen)
    yield path


def _as_function(path: str, script: str, numbers: dict[str, str]) -> str:
    def imports(found: re.Match[str]) -> str:
        return f"const {{{found[1].replace(' as ', ': ')}}} = {numbers[_resolved(path, found[2])]};"

    names = ", ".join(_EXPORT.findall(script))
    body = _EXPORT.sub("", _IMPORT.sub(imports, script))
    body = _LATER.sub(lambda found: f'import("./{_resolved(path, found[1])}")', body)
    if (left := _LEFT.search(body)) is not None:
        raise ValueError(f"{path}: {left[0]!r} is not written as imports and exports of the page are")
    return f"const {numbers[path]} = (() => {{\n{body}return {{ {names} }};\n}})();\n"


def _resolved(path: str, imported: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), imported))
