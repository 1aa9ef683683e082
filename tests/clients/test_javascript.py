"""The JavaScript package of OpenAI under node."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from live import LiveServer

FOLDER = Path(sys.prefix) / "javascript"
"""The folder in which `make clients` has npm install packages."""


def test_the_javascript_package(demo: LiveServer) -> None:
    node = shutil.which("node")
    if node is None or not (FOLDER / "node_modules" / "openai").is_dir():
        pytest.skip("node or its package openai is not installed")
    script = Path(__file__).with_name("openai.mjs")
    command = [node, str(script), str(FOLDER), demo.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
