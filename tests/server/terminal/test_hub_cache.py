"""`facet pull` and `facet list`, with a stand-in for the hub and a cache of files that are written here."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from fake_hub import FakeHub

from server.run.commands import FAILED, INTERRUPTED, run
from server.terminal import hub_cache

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_a_model_is_downloaded_and_its_place_told(
    fake: FakeHub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(20_000_000))
    assert run("facet", ["pull", "owner/name", "--revision", "v2", "--download-dir", "there"]) == 0
    out, errors = capsys.readouterr()
    assert out == f"owner/name: 0.02 GB in {tmp_path}\n"
    assert errors.startswith("Downloading the model (")
    assert (fake.calls[-1]["revision"], fake.calls[-1]["cache_dir"]) == ("v2", "there")


def test_why_nothing_was_downloaded_is_told(
    fake: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.failure = OSError("the line is cut")
    assert run("facet", ["pull", "owner/name"]) == FAILED
    assert "error: downloading 'owner/name' failed: the line is cut" in capsys.readouterr().err

    def interrupt(*_: Any) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub_cache, "resolve", interrupt)
    assert run("facet", ["pull", "owner/name"]) == INTERRUPTED
    assert "the same command goes on" in capsys.readouterr().err


def cached(folder: Path, name: str, size: int) -> Path:
    """Writes a model of one file into a cache, as huggingface_hub lays it out; returns its blobs."""
    repository = folder / f"models--{name.replace('/', '--')}"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    for each in (snapshot, blobs, repository / "refs"):
        each.mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (blobs / "1").write_bytes(bytes(size))
    (snapshot / "model.safetensors").symlink_to(blobs / "1")
    return blobs


def test_models_of_the_cache_and_of_a_server_are_listed(
    url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cached(tmp_path, "org/whole", 30_000_000)
    (cached(tmp_path, "org/part", 10_000_000) / "2.incomplete").touch()
    assert run("facet", ["list", "--url", url, "--download-dir", str(tmp_path)]) == 0
    title, *lines, place, served = capsys.readouterr().out.splitlines()
    assert title.split() == ["downloaded", "size", "last", "used"]
    shown = {line.rsplit(maxsplit=1)[0].replace("  ", " ").strip() for line in lines}
    assert {" ".join(line.split()) for line in shown} == {"org/whole 0.03 GB", "org/part 0.01 GB (in part)"}
    assert place == f"in {tmp_path}"
    assert served == f"served at {url}: org/tiny, tiny"


def test_an_empty_cache_and_no_server_are_no_errors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("facet", ["list", "--url", NOBODY, "--download-dir", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out == (
        f"no model lies in {tmp_path}/none: `facet pull MODEL` downloads one\nno server runs at {NOBODY}\n"
    )
