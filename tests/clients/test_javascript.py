"""The JavaScript packages of OpenAI and Ollama under node."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from live import LiveServer

FOLDER = Path(sys.prefix) / "javascript"
"""The folder in which `make clients` has npm install packages."""


@pytest.mark.parametrize("package", ["openai", "ollama"])
def test_the_javascript_package(demo: LiveServer, package: str) -> None:
    node = shutil.which("node")
    if node is None or not (FOLDER / "node_modules" / package).is_dir():
        pytest.skip(f"node or its package {package} is not installed")
    script = Path(__file__).with_name(f"{package}.mjs")
    command = [node, str(script), str(FOLDER), demo.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
