"""What the HTTP API answers over an engine that says what tests/transcripts/fake.jsonl says."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import fake_transcripts
import pytest
import transcripts
from fake_helpers import FakeLongBodies

from server.http import endpoint
from server.reading.body_table import Reading
from server.reading.endpoint_table import BY_PATH


async def test_answers_are_those_of_the_transcripts(tmp_path: Path) -> None:
    cases = transcripts.read("fake")
    assert transcripts.changed(cases, await fake_transcripts.replay(cases, tmp_path)) == []


@pytest.mark.slow(5)
async def test_answers_are_the_same_if_bodies_are_long_and_a_helper_reads_them(tmp_path: Path) -> None:
    cases = [case for case in transcripts.read("fake") if "short" not in case]
    read, named = FakeLongBodies.read, set[str]()

    async def noted(helper: FakeLongBodies, reading: Reading[Any], *arguments: Any, **more: Any) -> Any:
        named.add(reading.name)
        return await read(helper, reading, *arguments, **more)

    with patch.object(endpoint, "is_long", lambda raw: True), patch.object(FakeLongBodies, "read", noted):
        assert transcripts.changed(cases, await fake_transcripts.replay(cases, tmp_path)) == []
    readings = {row.reading.name for row in BY_PATH.values() if row.reading is not None}
    assert readings - named == {"embed_sparse"}, "but for sparse vectors, which transcripts do not have"
