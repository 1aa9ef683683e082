"""Models that fit a machine, by the table and by `facet models --suggest`."""

from pathlib import Path

import pytest

from server.run.commands import run
from server.terminal import suggestions
from server.terminal.suggestions import CHAT, Machine, suggested, this_machine

GB = 10**9


def names(memory: int, processor: str | None) -> list[str]:
    return [model.name.rpartition("/")[2] for model in suggested(Machine(memory, processor)).values()]


def test_models_fit_the_memory_and_the_processor() -> None:
    assert names(28 * GB, "amx") == [
        "Qwen3-30B-A3B-GGUF:Q4_K_M",
        "Qwen3-0.6B-GGUF:Q8_0",
        "Qwen3-Embedding-0.6B",
    ]
    assert names(14 * GB, "avx512") == [
        "Qwen3-8B-GGUF:Q4_K_M",
        "Qwen3-4B-GGUF:Q4_K_M",
        "Qwen3-Embedding-0.6B",
    ]
    assert names(14 * GB, "avx2") == ["Qwen3-4B-GGUF:Q4_K_M", "Qwen3-0.6B-GGUF:Q8_0", "multilingual-e5-small"]
    assert names(14 * GB, "") == ["Qwen3-0.6B-GGUF:Q8_0", "SmolLM2-135M-Instruct", "all-MiniLM-L6-v2"]
    assert names(80 * GB, None)[0] == "Qwen3-32B"
    assert names(1 * GB, "avx2")[0] == CHAT[-1].name.rpartition("/")[2]  # better the smallest than none


def test_a_machine_is_its_available_memory_and_its_best_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    (tmp_path / "proc/cpuinfo").write_text("flags : sse2\n")
    assert this_machine(tmp_path) == Machine(8_192_000_000, "")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    monkeypatch.setattr(suggestions.nvidia, "why_unusable", lambda *_: None)
    monkeypatch.setattr(suggestions, "printed_by", lambda *_: "81000\n[N/A]\n")
    assert this_machine(tmp_path) == Machine(81000 << 20, None)


def test_models_are_suggested_with_their_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suggestions, "this_machine", lambda: Machine(28 * GB, "amx"))
    assert run("facet", ["models", "--suggest"]) == 0
    title, best, *_ = capsys.readouterr().out.splitlines()
    assert title == "for this machine (28.00 GB of memory available, kernels: amx):"
    assert best.split() == ["best", "answers:", "facet", "serve", CHAT[2].name, "18.56", "GB"]
    assert f"`facet serve {CHAT[2].name}`" in suggestions.hint()
