"""`facet keys` shows a key once, writes its digest, and leaves the rest of the file alone."""

import hashlib
import shlex
import sys
from pathlib import Path

import pytest

from server.access.key_file import read_keys
from server.options.option_parsing import OptionError
from server.run.commands import BAD_USAGE
from server.terminal.keys import run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def call(file: Path, line: str) -> int:
    """Runs a command line as `facet keys` does, and returns the exit code."""
    try:
        return run([*shlex.split(line), "--file", str(file)] if line else [], "facet keys")
    except OptionError as error:
        print(error, file=sys.stderr)
        return BAD_USAGE


def test_a_key_is_shown_once_and_only_its_digest_is_kept(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--weight 3 --max-running 2 --max-queued 0 --tasks generate score --admin --expires 2031-05-06"
    options += " --models chat m/1 \N{GRINNING FACE}"
    assert call(file, f"add alice {options} --requests-per-minute 9 --priority -1 --share-prefixes") == 0
    secret = capsys.readouterr().out.strip()
    assert secret.startswith("sk-") and len(secret) > 40
    assert secret not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    [key] = read_keys(file)
    assert key.sha256 == hashlib.sha256(secret.encode()).hexdigest()
    assert (key.name, key.weight, key.max_running, key.max_queued) == ("alice", 3.0, 2, 0)
    assert key.models == ["chat", "m/1", "\N{GRINNING FACE}"]
    assert (key.tasks, key.admin, key.priority, key.share_prefixes) == (["generate", "score"], True, -1, True)
    assert key.expires is not None and key.expires.isoformat() == "2031-05-06T00:00:00+00:00"
    assert call(file, "list") == 0
    shown = capsys.readouterr().out
    assert "alice" in shown and "generate+score+admin" in shown and key.sha256 not in shown


def test_what_stands_in_the_file_stays(file: Path) -> None:
    call(file, "add first")
    written = file.read_text()
    file.write_text("# Ours.\n" + written + "# Of the second.")
    file.chmod(0o640)
    call(file, "add second --weight 2")
    assert file.read_text().startswith("# Ours.\n" + written + "# Of the second.\n")
    assert file.stat().st_mode & 0o777 == 0o640
    assert call(file, "remove first") == 0
    assert [key.name for key in read_keys(file)] == ["second"]
    assert file.read_text().startswith("# Ours.\n# Of the second.\n")
    assert [path.name for path in file.parent.iterdir()] == ["keys.toml"], "no other file is left"


def test_the_last_key_can_be_removed(file: Path) -> None:
    call(file, "add only")
    assert call(file, "remove only") == 0
    assert read_keys(file) == []


def test_a_link_stays_a_link(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    assert call(link, "add alice") == 0
    assert link.is_symlink() and len(read_keys(file)) == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("add alice", "there is a key of the name alice already"),
        ("add 1st", "name: it must be a letter"),
        ("add bob --weight 0", "weight: Expected float >= 0.001"),
        ("add bob --tasks dance", "--tasks: 'dance' is not one of"),
        ("add bob --expires soon", "--expires"),
        ("remove bob", "there is no key of the name bob"),
        ("", "add|list|remove"),
    ],
)
def test_mistakes_change_nothing(
    file: Path, line: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call(file, "add alice")
    before = file.read_text()
    capsys.readouterr()
    assert call(file, line) == 2
    printed = capsys.readouterr()
    assert told in printed.err and not printed.out
    assert file.read_text() == before


def test_a_broken_file_is_not_made_worse(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("[[keys]]\nname = 3\n")
    assert call(file, "add bob") == 2
    assert "line 2: name" in capsys.readouterr().err
    assert file.read_text() == "[[keys]]\nname = 3\n"


def test_another_way_of_writing_is_left_to_people(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(f'keys = [{{name = "a", sha256 = "{"0" * 64}"}}]\n')
    assert call(file, "remove a") == 2
    assert "by hand" in capsys.readouterr().err


def test_without_a_file_it_says_how_to_name_one() -> None:
    with pytest.raises(OptionError, match="FACET_API_KEY_FILE"):
        run(["list"], "facet keys")
