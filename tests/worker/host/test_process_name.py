from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from worker.host.process_name import shown_name


@pytest.mark.parametrize(
    ("name", "shown"),
    [("engine", "facet: engine"), ("engine 0", "facet: engine 0"), ("engine 10", "facet:engine 10")],
)
def test_names_fit_into_what_the_system_keeps(name: str, shown: str) -> None:
    assert shown_name(name) == shown


def test_long_names_lose_their_end() -> None:
    assert shown_name("supervisor") == "facet:superviso"


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="only Linux shows names of processes")
def test_the_system_shows_the_name() -> None:
    program = "from worker import logs; logs.setup('engine 3', 'info'); print(open('/proc/self/comm').read())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "facet: engine 3"
