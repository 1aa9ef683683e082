"""The GGUF file that is served, of several in a folder and on the hub."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from fake_hub import FakeHub

from models.checkpoint import hub
from models.checkpoint.hub import HubError, choose_gguf

FILES = [
    "Qwen3-0.6B-Q4_K_M.gguf",
    "Qwen3-0.6B-Q4_K_S.gguf",
    "Qwen3-0.6B-UD-Q4_K_XL.gguf",
    "Qwen3-0.6B-IQ4_XS.gguf",
    "Qwen3-0.6B-q8_0.gguf",
    "Qwen3-0.6B-BF16-00001-of-00002.gguf",
    "Qwen3-0.6B-BF16-00002-of-00002.gguf",
    "Q6_K/Qwen3-0.6B.gguf",
    "mmproj-Q8_0.gguf",
    "imatrix.gguf",
]
"""As publishers name them."""


@pytest.mark.parametrize(
    ("quant", "file"),
    [
        ("Q4_K_M", "Qwen3-0.6B-Q4_K_M.gguf"),
        ("q4_k_s", "Qwen3-0.6B-Q4_K_S.gguf"),
        ("UD-Q4_K_XL", "Qwen3-0.6B-UD-Q4_K_XL.gguf"),
        ("IQ4_XS", "Qwen3-0.6B-IQ4_XS.gguf"),
        ("Q8_0", "Qwen3-0.6B-q8_0.gguf"),
        ("BF16", "Qwen3-0.6B-BF16-00001-of-00002.gguf"),
        ("Q6_K", "Q6_K/Qwen3-0.6B.gguf"),
    ],
)
def test_the_file_with_this_form_in_its_name(quant: str, file: str) -> None:
    assert choose_gguf(FILES, quant, "here") == file


def test_a_single_file_needs_no_name() -> None:
    assert choose_gguf(["mmproj-f16.gguf", "model.gguf"], None, "here") == "model.gguf"


@pytest.mark.parametrize(
    ("names", "quant", "message"),
    [
        (FILES, None, "here holds several GGUF files: Q6_K/.*Q4_K_S.*; say which with --quant"),
        (FILES, "Q4_K", "here holds no GGUF file of Q4_K, but Q6_K/.*: name one of these with --quant"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", r"several GGUF files of Q4_0: a-Q4_0\.gguf, b-Q4_0\.gguf"),
        ([], None, "here holds no GGUF file$"),
        ([], "Q8_0", "here holds no GGUF file of Q8_0$"),
    ],
)
def test_none_or_several_are_refused_with_the_list(names: list[str], quant: str | None, message: str) -> None:
    with pytest.raises(HubError, match=message):
        choose_gguf(names, quant, "here")


def resolve(model: str, quant: str | None = None) -> Path:
    return hub.resolve(model, None, None, lambda _: None, "auto", quant)


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    return folder


def test_a_path_is_the_file_and_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "blob")
    (tmp_path / "model.gguf").symlink_to(tmp_path / "blob")
    monkeypatch.chdir(tmp_path)
    assert resolve("model.gguf") == tmp_path / "model.gguf"


def test_a_folder_with_one_file_or_with_a_choice(tmp_path: Path) -> None:
    folder = str(fill(tmp_path, "a-Q4_0.gguf"))
    assert resolve(folder) == tmp_path / "a-Q4_0.gguf"
    fill(tmp_path, "a-Q8_0.gguf", "Q6_K/a.gguf")
    assert resolve(folder, "Q8_0") == tmp_path / "a-Q8_0.gguf"
    assert resolve(folder, "q6_k") == tmp_path / "Q6_K" / "a.gguf"
    with pytest.raises(hub.HubError, match=r"several GGUF files: Q6_K/a\.gguf, a-Q4_0\.gguf, a-Q8_0\.gguf;"):
        resolve(folder)


def test_other_weights_count_unless_a_form_is_named(tmp_path: Path) -> None:
    folder = str(fill(tmp_path, "config.json", "model.safetensors", "a-Q4_0.gguf"))
    assert resolve(folder) == tmp_path
    assert resolve(folder, "Q4_0") == tmp_path / "a-Q4_0.gguf"


def test_a_folder_without_weights_stays_one(tmp_path: Path) -> None:
    assert resolve(str(fill(tmp_path, "config.json", "gguf/a.gguf"))) == tmp_path


REPOSITORY = dict.fromkeys(FILES, 100) | {"README.md": 1, "config.json": 1, "original/config.json": 1}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path, repository=REPOSITORY)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


@pytest.mark.parametrize(
    ("model", "quant"), [("org/name:Q4_K_M", None), ("org/name", "Q4_K_M"), ("hf.co/org/name:Q4_K_M", None)]
)
def test_only_the_wanted_file_is_downloaded(model: str, quant: str | None, fake: FakeHub) -> None:
    assert resolve(model, quant) == fake.snapshot / "Qwen3-0.6B-Q4_K_M.gguf"
    assert fake.downloaded == {"Qwen3-0.6B-Q4_K_M.gguf", "config.json"}
    assert {call["repo_id"] for call in fake.calls} == {"org/name"}


def test_all_parts_are_downloaded(fake: FakeHub) -> None:
    assert resolve("org/name:bf16") == fake.snapshot / "Qwen3-0.6B-BF16-00001-of-00002.gguf"
    assert fake.downloaded == {*(name for name in FILES if "BF16" in name), "config.json"}


def test_a_file_in_a_folder_of_its_form(fake: FakeHub) -> None:
    assert resolve("org/name:Q6_K") == fake.snapshot / "Q6_K" / "Qwen3-0.6B.gguf"
    assert fake.downloaded == {"Q6_K/Qwen3-0.6B.gguf", "config.json"}


def test_a_repository_of_several_is_refused_before_anything_is_downloaded(fake: FakeHub) -> None:
    with pytest.raises(hub.HubError, match=r"'org/name' holds several GGUF files: .*Q4_K_M.*--quant"):
        resolve("org/name")
    with pytest.raises(hub.HubError, match="'org/name' holds no GGUF file of Q2_K, but"):
        resolve("org/name:Q2_K")
    assert not fake.downloaded


def test_a_repository_with_one_file_needs_no_name(fake: FakeHub) -> None:
    fake.repository = {"model.gguf": 100, "README.md": 1}
    assert resolve("org/name") == fake.snapshot / "model.gguf"


def test_two_forms_are_refused(fake: FakeHub) -> None:
    with pytest.raises(hub.HubError, match="two forms are named: Q8_0 and --quant Q4_0"):
        resolve("org/name:Q8_0", "Q4_0")


def test_a_hub_that_does_not_answer_leaves_the_cached_files(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*, dry_run: bool = False, **call: object) -> object:
        if dry_run:
            raise huggingface_hub.errors.DryRunError("cannot be accessed")
        return fake.snapshot_download(**call)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    fill(fake.snapshot, "config.json", "a-Q8_0.gguf")
    assert resolve("org/name:Q8_0") == fake.snapshot / "a-Q8_0.gguf"
    assert resolve("org/name") == fake.snapshot / "a-Q8_0.gguf"
