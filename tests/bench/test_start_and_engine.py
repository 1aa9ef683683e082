"""The programs that measure a start, and the engine without a server."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import msgspec
import offline
import pytest
import startup

from server.bench.serve_options import BenchError


@pytest.mark.parametrize("flags", [["--input-len", "90"], ["--input-len", "101", "--embed"]])
def test_texts_that_the_model_cannot_take_are_not_tried(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MagicMock()
    model.__enter__.return_value.facts = SimpleNamespace(max_model_len=100, tasks=("generate", "embed"))
    monkeypatch.setattr(offline, "LLM", lambda *_, **__: model)
    with pytest.raises(BenchError, match=r"^--input-len .*may be 100 tokens here, .* not 101$"):
        offline.run(["--output-len", "11", *flags], "offline")


def test_a_server_that_does_not_start_is_told_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"^the server ended: there is no option --zz"):
        startup.measure(str(tmp_path / "none"), ["--zz"])


def test_a_start_that_is_not_to_be_made_is_refused() -> None:
    with pytest.raises(BenchError, match="--runs must be at least 1"):
        startup.run(["demo", "--runs", "0"], "startup")


def test_medians_leave_out_what_nobody_measured() -> None:
    starts = [
        startup.Start(None, 1, 2, 3),
        startup.Start(None, 3, 4, 5),
        startup.Start(None, 9, 9, 9),
    ]
    assert startup.medians(starts) == startup.Start(None, 3, 4, 5)


def test_a_start_is_timed_from_its_first_answer_to_its_first_token() -> None:
    start = startup.measure("demo", ["--cpu-threads", "1"])
    assert isinstance(start, startup.Start)
    assert start.floor is not None
    assert 0 < start.live <= start.ready <= start.first


def test_the_engine_is_measured_without_a_server(tmp_path: Path) -> None:
    """The offline benchmark runs in a process of its own, because it changes which kernels that process uses.

    Tokens enough that no pause of the machine outlasts their decoding.
    """
    script = str(Path(offline.__file__))
    sizes = ["--batch", "2", "--input-len", "8", "--output-len", "64", "--runs", "2", "--cpu-threads", "1"]
    for more, field in (([], "output_tokens_per_second"), (["--embed"], "inputs_per_second")):
        written = tmp_path / "result.json"
        command = [sys.executable, script, "demo", *sizes, *more, "--output", str(written)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        [row] = msgspec.json.decode(written.read_bytes())["rows"]
        assert row[field] > 0
