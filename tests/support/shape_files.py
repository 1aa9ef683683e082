"""Fields of configs by name, which lie as JSON in the folder `shapes`.

Fields begin with those of the entries that `of` names; what `#` says is for readers.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def read_shapes(file: str) -> dict[str, Any]:
    """Returns the entries of a file with all their fields."""
    made: dict[str, Any] = {}
    for name, fields in json.loads((Path(__file__).parent / "shapes" / f"{file}.json").read_text()).items():
        made[name] = _whole(fields, made)
    return made


def _whole(value: Any, made: dict[str, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    fields: dict[str, Any] = {}
    for part in value.get("of", "").split():
        fields |= made[part]
    return fields | {name: _whole(each, made) for name, each in value.items() if name not in ("of", "#")}
