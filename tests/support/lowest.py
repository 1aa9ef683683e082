"""Prints the lowest versions that pyproject.toml allows, as constraints for `make test-lowest`."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def constraints(requirements: Iterable[str]) -> list[str]:
    """`name==version` for each requirement with a lower bound; the others are left to pip."""
    found = (re.match(r"([\w-]+)(?:\[.*])?>=([\w.]+)", requirement) for requirement in requirements)
    return [f"{match[1]}=={match[2]}" for match in found if match]


def main() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["test"]
    print("\n".join(constraints(requirements)))


if __name__ == "__main__":
    main()
