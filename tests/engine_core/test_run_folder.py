"""The folder of a run: private, named after its owner, and removed by the next start if its owner cannot."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine_core.run_folder import RunFolder

OWNER = """
import signal, sys
from pathlib import Path
from engine_core.run_folder import RunFolder
kept = RunFolder(Path(sys.argv[1]))
(kept.path / "0.requests").touch()
print(kept.path, flush=True)
signal.pause()
"""


def test_it_is_private_and_named_after_its_owner(short_path: Path) -> None:
    first, second = RunFolder(short_path), RunFolder(short_path)
    assert first.path.name.startswith(f"facet-{os.getpid()}-")
    assert second.path.name == f"{first.path.name}-1"
    assert first.path.stat().st_mode & 0o777 == 0o700
    first.remove()
    second.remove()
    assert list(short_path.iterdir()) == []


def test_those_of_killed_owners_are_removed_and_no_others(short_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(short_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        strangers = [short_path / "facet-abcdefgh", short_path / "facet-notes-1", short_path / "other"]
        for folder in strangers:
            folder.mkdir()
        (short_path / "facet-1-1").symlink_to(short_path / "other")
        mine = RunFolder(short_path)
        assert (theirs / "0.requests").exists(), "its owner lives"
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert theirs.exists()
    RunFolder(short_path).remove()
    assert not theirs.exists()
    assert mine.path.exists() and all(folder.exists() for folder in strangers)
    mine.remove()


def test_a_folder_too_long_for_sockets_is_named(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(ValueError, match="set TMPDIR"):
        RunFolder(deep)
