"""Draws the rooms of the floors in the order in which they may import each other, as in pyproject.toml."""

from __future__ import annotations

import ast
import re
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = {
    "server": "HTTP and text; no torch",
    "engine_core": "scheduling and messages; no torch",
    "worker": "tensors, sampling, memory",
    "models": "layers and families",
}
COLUMNS, WIDTH, HEIGHT, GAP, TOP = 5, 172, 46, 10, 34


def picture() -> str:
    """The SVG of all floors, each above those that it may import."""
    parts: list[str] = []
    y = 16
    for floor, about in FLOORS.items():
        rooms = rooms_of(floor)
        height = TOP + -(-len(rooms) // COLUMNS) * (HEIGHT + GAP) + 4
        parts += [
            f'<rect x="16" y="{y}" width="928" height="{height}" rx="10" fill="#f1f5f9" stroke="#94a3b8"/>',
            f'<text x="30" y="{y + 22}" fill="#0f172a"><tspan font-weight="600">{floor}</tspan>'
            f'<tspan dx="12" fill="#475569" font-size="12.5">{about}</tspan></text>',
        ]
        for place, room in enumerate(rooms):
            row, column = divmod(place, COLUMNS)
            parts += box(30 + column * (WIDTH + GAP), y + TOP + row * (HEIGHT + GAP), floor, room)
        y += height + 14
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {y + 2}" '
    font = 'font-family="ui-sans-serif, system-ui, sans-serif" font-size="14">'
    return "\n".join([head + font, f'<rect width="960" height="{y + 2}" fill="#fff"/>', *parts, "</svg>", ""])


def rooms_of(floor: str) -> list[str]:
    """The folders of a floor in the order of its contract, highest first; its single files are left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["name"].startswith(f"Rooms of {floor}"))
    names = [name.strip(" ()") for layer in layers for name in layer.replace(":", "|").split("|")]
    return [name for full in names if (ROOT / floor / (name := full.split(".")[-1]) / "__init__.py").exists()]


def box(x: int, y: int, floor: str, room: str) -> list[str]:
    text = escape(purpose(floor, room))
    return [
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#fff" stroke="#cbd5e1"/>',
        f'<text x="{x + 10}" y="{y + 19}" font-weight="600" fill="#0f172a" font-size="13">{room}/</text>',
        f'<text x="{x + 10}" y="{y + 36}" fill="#475569" font-size="10.5">{text}</text>',
    ]


def purpose(floor: str, room: str) -> str:
    """What a room is for: the beginning of the doc string of its package, up to a colon or full stop."""
    text = ast.get_docstring(ast.parse((ROOT / floor / room / "__init__.py").read_text()))
    if not text:
        raise SystemExit(f"{floor}/{room}/__init__.py: say in a doc string what the room is for")
    return re.split("[:.]", text)[0]
