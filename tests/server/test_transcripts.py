"""What the HTTP API answers over an engine that says what tests/transcripts/fake.jsonl says."""

from pathlib import Path
from unittest.mock import patch

import fake_transcripts
import transcripts

from server.http import endpoint


async def test_answers_are_those_of_the_transcripts(tmp_path: Path) -> None:
    cases = transcripts.read("fake")
    assert transcripts.changed(cases, await fake_transcripts.replay(cases, tmp_path)) == []


async def test_answers_are_the_same_if_bodies_are_long_and_a_helper_reads_them(tmp_path: Path) -> None:
    cases = [case for case in transcripts.read("fake") if "short" not in case]
    with patch.object(endpoint, "is_long", lambda raw: True):
        assert transcripts.changed(cases, await fake_transcripts.replay(cases, tmp_path)) == []
