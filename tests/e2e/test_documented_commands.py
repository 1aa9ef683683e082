"""Every curl line of the README and the docs, and the programs of some pages, run against the demo model."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import LiveServer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\$ )?(curl .*)$", re.MULTILINE)
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
OWN = re.compile(r"(?:localhost|127\.0\.0\.1):8000")


def commands() -> Iterator[tuple[str, str]]:
    """Each curl command that asks a server of this machine, with its page."""
    for page in PAGES:
        for block in BLOCK.findall(page.read_text()):
            for start in COMMAND.finditer(block):
                command = whole(block[start.start(1) :])
                if OWN.search(command):
                    yield page.name, command


def whole(text: str) -> str:
    """The command at the beginning of a text, with the lines that belong to it."""
    lines = text.splitlines()
    for count in range(1, len(lines) + 1):
        command = "\n".join(lines[:count])
        if command.count("'") % 2 == 0 and not command.endswith("\\"):
            return command
    raise ValueError(f"the command has no end: {text[:80]}")


def test_commands_are_found_with_all_their_lines() -> None:
    assert whole("curl a \\\n  -d '{\n\"b\": 1}'\nHTTP/1.1 200 OK") == "curl a \\\n  -d '{\n\"b\": 1}'"
    assert len(list(commands())) >= 6


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(("page", "command"), list(commands()), ids=lambda part: part[:40])
def test_a_documented_command_is_answered(demo: LiveServer, page: str, command: str) -> None:
    asked = OWN.sub(f"127.0.0.1:{demo.port}", command).replace("curl ", "curl --fail-with-body -sS ", 1)
    done = subprocess.run(["sh", "-c", asked], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{page}: {command}\n{done.stdout}{done.stderr}"
    assert done.stdout and '"error":{' not in done.stdout


@pytest.mark.turns
@pytest.mark.parametrize("name", ["getting-started.md", "howto-rag.md"])
def test_the_programs_of_a_page_say_what_the_demo_model_knows(demo: LiveServer, name: str) -> None:
    programs = PROGRAM.findall((ROOT / "docs" / name).read_text())
    assert programs
    for program in programs:
        command = [sys.executable, "-c", OWN.sub(f"127.0.0.1:{demo.port}", program)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert "Paris" in done.stdout
