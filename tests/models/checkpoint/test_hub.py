from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from httpx2 import Request, Response
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

from models.checkpoint import hub

REPOSITORY = {
    "README.md": 100,
    "config.json": 10,
    "generation_config.json": 10,
    "model-00001-of-00002.safetensors": 1000,
    "model-00002-of-00002.safetensors": 1000,
    "model.safetensors.index.json": 20,
    "consolidated.safetensors": 2000,
    "pytorch_model.bin": 2000,
    "training_args.bin": 5,
    "tokenizer.json": 50,
    "tokenizer.model": 50,
    "tokenizer_config.json": 10,
    "merges.txt": 10,
    "chat_template.jinja": 10,
    "model-q4.gguf": 700,
    "onnx/model.onnx": 700,
    "onnx/config.json": 10,
    "original/params.json": 10,
    "1_Pooling/config.json": 10,
    "2_Dense/config.json": 10,
    "2_Dense/model.safetensors": 30,
    "2_Dense/pytorch_model.bin": 30,
}
SMALL = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "merges.txt",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
}
SAFETENSORS = {
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "2_Dense/model.safetensors",
}


@dataclass
class File:
    filename: str
    file_size: int
    will_download: bool


@dataclass
class FakeHub:
    """A stand-in for snapshot_download: one repository, partly cached, and perhaps a reason to fail."""

    snapshot: Path
    cached: set[str] = field(default_factory=set)
    failure: Exception | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    downloaded: set[str] = field(default_factory=set)

    def snapshot_download(self, *, dry_run: bool = False, **call: Any) -> list[File] | str:
        self.calls.append(call)
        if self.failure is not None:
            raise self.failure
        names = set(filter_repo_objects(REPOSITORY, **{k: v for k, v in call.items() if "patterns" in k}))
        if dry_run:
            return [File(name, REPOSITORY[name], name not in self.cached) for name in sorted(names)]
        self.downloaded = names - self.cached
        self.transfer(call["tqdm_class"])
        return str(self.snapshot)

    def transfer(self, bar_class: Callable[..., Any]) -> None:
        with bar_class(total=0, unit="B") as received, bar_class(total=3, desc="Fetching 3 files") as files:
            for name in sorted(self.downloaded):
                received.total += REPOSITORY[name]
                received.update(REPOSITORY[name] // 2)
                received.update(REPOSITORY[name] - REPOSITORY[name] // 2)
                files.update()
            received.set_description("done")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def no_report(fraction: float) -> None:
    pass


def resolve(model: str, load_format: str = "auto", revision: str | None = None) -> Path:
    return hub.resolve(model, revision, None, no_report, load_format)


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> Exception:
    return kind("no", response=Response(status, request=Request("GET", "https://hub.test/api")))


def test_a_folder_is_itself(tmp_path: Path, fake: FakeHub) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    assert not fake.calls


def test_a_relative_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("some/model") == tmp_path / "some" / "model"


def test_the_demo_is_inside_the_package(fake: FakeHub) -> None:
    assert resolve("demo") == Path(hub.__file__).parents[1] / "demo"
    assert not fake.calls


@pytest.mark.parametrize(
    ("load_format", "weights"),
    [
        ("auto", SAFETENSORS),
        ("safetensors", SAFETENSORS),
        ("pt", {"pytorch_model.bin", "2_Dense/pytorch_model.bin"}),
        ("dummy", set()),
    ],
)
def test_only_what_serving_needs_is_downloaded(fake: FakeHub, load_format: str, weights: set[str]) -> None:
    assert resolve("owner/name", load_format) == fake.snapshot
    assert fake.downloaded == SMALL | weights


def test_revision_and_cache_are_passed_on(fake: FakeHub) -> None:
    hub.resolve("owner/name", "v2", "/cache", no_report)
    assert {(call["repo_id"], call["revision"], call["cache_dir"]) for call in fake.calls} == {
        ("owner/name", "v2", "/cache")
    }


def test_progress_is_the_fraction_of_missing_bytes(fake: FakeHub, capfd: pytest.CaptureFixture[str]) -> None:
    fake.cached = SMALL | {"2_Dense/model.safetensors"}
    reported: list[float] = []
    hub.resolve("owner/name", None, None, reported.append)
    assert reported == [0.25, 0.5, 0.75, 1.0]
    assert capfd.readouterr() == ("", "")


def test_nothing_is_reported_when_all_is_cached(fake: FakeHub) -> None:
    fake.cached = set(REPOSITORY)
    reported: list[float] = []
    hub.resolve("owner/name", None, None, reported.append)
    assert reported == []


def test_a_hub_that_does_not_answer_leaves_the_cache(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*, dry_run: bool = False, **call: Any) -> list[File] | str:
        if dry_run:
            raise errors.DryRunError("cannot be accessed")
        return fake.snapshot_download(**call)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert resolve("gpt2") == fake.snapshot


@pytest.mark.parametrize("model", ["/no/such/folder", "./name", "a/b/c", "owner/", "~/model", ""])
def test_neither_a_folder_nor_a_hub_id(fake: FakeHub, model: str) -> None:
    with pytest.raises(hub.HubError, match="is not a folder here, and cannot be a hub id"):
        resolve(model)
    assert not fake.calls


def test_a_file_instead_of_its_folder(tmp_path: Path, fake: FakeHub) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(hub.HubError, match="is a file; give the folder"):
        resolve(str(file))


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (http_error(errors.GatedRepoError, 403), "'owner/name' at revision 'v9' is gated: .* HF_TOKEN"),
        (http_error(errors.RepositoryNotFoundError, 404), "neither a folder here nor a model .* HF_TOKEN"),
        (http_error(errors.RevisionNotFoundError, 404), "no revision 'v9' of 'owner/name'"),
        (errors.LocalEntryNotFoundError("no"), "not in the cache, and the hub cannot be reached"),
        (http_error(errors.HfHubHTTPError, 500), "downloading 'owner/name' .*failed: no"),
        (OSError(28, "No space left on device"), "failed: .*No space left on device"),
    ],
)
def test_failures_say_what_to_do(fake: FakeHub, failure: Exception, message: str) -> None:
    fake.failure = failure
    with pytest.raises(hub.HubError, match=message):
        resolve("owner/name", revision="v9")


def test_offline_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real library is used here, in its own offline mode."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(hub.HubError, match=r"'owner/name' is not a folder here.*HF_HUB_OFFLINE"):
        hub.resolve("owner/name", None, str(tmp_path), no_report)


def test_offline_with_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real library is used here, with a cache as a download leaves it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    commit = "0" * 40
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert hub.resolve("owner/name", None, str(tmp_path), no_report) == snapshot
