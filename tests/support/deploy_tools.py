"""The tools that check the files in deploy/: those of `make deploy-tools`, or of the system.

Tests that need one which is not installed are skipped.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
_OWN = ROOT / ".venv-deploy" / "bin"


def tool(name: str) -> str:
    """The path of a program; skips the test that asks for one that is not here."""
    found = shutil.which(name, path=os.pathsep.join([str(_OWN), os.environ["PATH"], "/usr/sbin", "/sbin"]))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(name: str, *arguments: str | Path) -> str:
    """What a tool prints. Fails if it is not content."""
    command: Sequence[str | Path] = [tool(name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def render_chart(values: dict[str, Any]) -> dict[str, str]:
    """The manifests of the chart by the path of their template; findings of the linter fail."""
    python = _OWN / "python"
    if not list(_OWN.parent.glob("lib/*/site-packages/helm_python")):
        pytest.skip("Helm is not installed")
    script = Path(__file__).with_name("helm_render.py")
    command = [python, script, DEPLOY / "helm" / "facet", json.dumps(values)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    worse = [one for one in report["findings"]["messages"] if one["severity"] > 1]
    assert not worse and not report["findings"]["errors"], report["findings"]
    return report["manifests"]
