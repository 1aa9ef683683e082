"""`facet doctor` and `facet collect-env`: what this machine has, for its owner and for reports of errors."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict

from server.terminal.doctor.findings import Finding, examine, version_of
from server.terminal.options import parser_of

FAILED = 1

_MARKS = {"good": "ok", "note": "ok", "slow": "slow", "broken": "BROKEN"}
_PACKAGES = (
    *("facet-serve", "torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy"),
    *("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "pyzmq", "msgspec", "pydantic", "jinja2"),
    *("llguidance", "ray", "triton"),
)


def run(arguments: Sequence[str], command: str, api_key: str | None) -> int:
    """Prints what was found. The exit code is 1 if something keeps every server from starting here."""
    parser = parser_of(command, "Look at this machine: what it has, what is missing, and what that costs.")
    parser.add_argument("--report", action="store_true", help="Text for a bug report: versions, too.")
    parser.add_argument("--json", action="store_true", help="The findings as JSON.")
    given = parser.parse_args(arguments)
    findings = list(examine())
    if given.json:
        print(json.dumps([asdict(one) for one in findings], indent=2))
    elif given.report or command.endswith("collect-env"):
        print(report(findings))
    else:
        print("\n".join(map(_line, findings)))
        print(_verdict(findings))
    return FAILED if any(one.grade == "broken" for one in findings) else 0


def report(findings: Sequence[Finding]) -> str:
    """Versions and findings as text that names neither user nor host."""
    home = os.path.expanduser("~")
    lines = [
        f"system: {platform.system()} {platform.release()} {platform.machine()}",
        f"libc: {' '.join(platform.libc_ver())}",
        f"python: {platform.python_implementation()} {platform.python_version()}",
        *(f"{name}: {version_of(name)}" for name in _PACKAGES),
        *map(_line, findings),
    ]
    text = "\n".join(lines)
    return text.replace(home, "~") if len(home) > 1 else text


def _line(one: Finding) -> str:
    line = f"{_MARKS[one.grade]:6} {one.name}: {one.text}"
    return f"{line}\n       {one.cost}" if one.cost else line


def _verdict(findings: Sequence[Finding]) -> str:
    broken = [one.name for one in findings if one.grade == "broken"]
    slow = [one.name for one in findings if one.grade == "slow"]
    if broken:
        return f"No model can be served here before this is repaired: {', '.join(broken)}."
    if slow:
        return f"Models can be served here; these make them slower than they need be: {', '.join(slow)}."
    return "Models can be served here."
