"""Names of models without one tell no folders."""

from pathlib import Path

import pytest

from server.options.model_name import shown_name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "demo"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("/srv/models/llama-3", "llama-3"),
        ("/srv/models/llama-3/", "llama-3"),
        ("./llama", "llama"),
        ("~/models/llama", "llama"),
        ("models/of/ours", "ours"),
        ("/c/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12", "Qwen/Qwen3-0.6B"),
        ("/", "model"),
        ("org/name-GGUF:Q4_K_M", "org/name-GGUF:Q4_K_M"),
        ("hf.co/org/name-GGUF:Q4_K_M", "org/name-GGUF:Q4_K_M"),
        ("/srv/models/Llama-3.2.Q4_K_M.gguf", "Llama-3.2.Q4_K_M"),
        ("model.gguf", "model"),
        ("big/Qwen3-Q8_0-00001-of-00003.gguf", "Qwen3-Q8_0"),
    ],
)
def test_the_shown_name(model: str, name: str) -> None:
    assert shown_name(model) == name


def test_the_folder_in_which_the_server_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    assert (shown_name("."), shown_name("..")) == ("inner", tmp_path.name)
