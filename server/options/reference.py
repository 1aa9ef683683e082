"""All options as rows for the reference page, docs/options.md."""

from __future__ import annotations

import msgspec

from server.options.table import OPTIONS


class OptionRow(msgspec.Struct, frozen=True):
    """An option as the reference page shows it."""

    flags: str
    default: str
    help: str


def option_groups() -> list[tuple[str, list[OptionRow]]]:
    """Return the table's groups in order, each with its rows."""
    groups: dict[str, list[OptionRow]] = {}
    for option in OPTIONS:
        flags = ", ".join([*option.flags, *([f"--no-{option.flag[2:]}"] if option.is_switch else [])])
        row = OptionRow(flags, option.written_default, option.doc.text)
        groups.setdefault(option.doc.group, []).append(row)
    return list(groups.items())
