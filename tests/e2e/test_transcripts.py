"""What real servers answer to the requests in tests/transcripts is what is written there."""

from pathlib import Path

import pytest
from later import Later
from live import LiveServer

live_transcripts, transcripts = map(Later, ("live_transcripts", "transcripts"))


@pytest.mark.slow(2)
def test_the_demo_model(demo: LiveServer) -> None:
    before = len(demo.log.read_text())  # of tests that use the same server
    assert live_transcripts.changes("demo", demo) == []
    said = [
        line
        for line in demo.log.read_text()[before:].splitlines()
        if " ERROR " in line or "has ended" in line
    ]
    assert said == [], "an engine that ends is asked again after its restart"


@pytest.mark.turns
@pytest.mark.parametrize("name", ["decoder", "several"])
def test_tiny_models(name: str, tmp_path: Path) -> None:
    with live_transcripts.started(name, tmp_path) as server:
        assert live_transcripts.changes(name, server) == []
