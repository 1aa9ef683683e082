"""What the HTTP API answers over an engine that says what tests/transcripts/fake.jsonl says."""

from pathlib import Path

import fake_transcripts
import transcripts


async def test_answers_are_those_of_the_transcripts(tmp_path: Path) -> None:
    cases = transcripts.read("fake")
    assert transcripts.changed(cases, await fake_transcripts.replay(cases, tmp_path)) == []
