"""`facet kernels compile`: what it refuses, and that it compiles a model from its config alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny import tiny_checkpoint

from server.options.option_table import OptionError
from server.terminal import compile_kernels

COMMAND = "facet kernels"


def run(*arguments: str) -> int:
    return compile_kernels.run(["compile", *arguments], COMMAND)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere at all", "--capability", "9.0"], "'nowhere at all' is neither a folder nor"),
        (
            ["demo", "--capability", "9.0", "sm_80", "--kv-cache-dtype", "fp8"],
            r"needs compute capability 8\.9, and 8\.0 was asked for: pass fp8_e5m2",
        ),
        (["demo", "--capability", "6.1"], r"'6\.1' is no compute capability that is known: there are 8\.0"),
        (["demo"], "--capability"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        run(*arguments)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-tp", "3"], "4 attention heads cannot be divided evenly"),
        (["-tp", "0"], "--tensor-parallel-size is 0, but must be at least 1"),
        (["-pp", "0"], "--pipeline-parallel-size is 0, but must be at least 1"),
        (["-pp", "2"], "1 layer"),
        (["-tp", "2", "--enable-expert-parallel"], "LlamaForCausalLM has no experts"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused(options: list[str], said: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint("LlamaForCausalLM", tmp_path / "model", num_hidden_layers=1)
    with pytest.raises(OptionError, match=said):
        run(str(folder), "--capability", "9.0", *options)


def test_without_triton_it_says_where_that_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> None:
        return None

    monkeypatch.setattr(compile_kernels, "find_spec", find_nothing)
    with pytest.raises(OptionError, match="Triton is not installed: it comes with torch for CUDA"):
        run("demo", "--capability", "9.0")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_a_model_is_compiled_from_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shape = {"num_hidden_layers": 2, "num_experts": 8}
    folder = tiny_checkpoint("Qwen3MoeForCausalLM", tmp_path / "model", **shape)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "made"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    options = ["--capability", "8.9", "--kv-cache-dtype", "fp8", "--dtype", "bfloat16"]
    assert run(str(folder), *options, "-tp", "2", "-pp", "2", "--enable-expert-parallel") == 0
    said = capfd.readouterr().out
    assert all(name in said for name in ("attend", "sort_pairs", "draw_row"))
    assert "variants in" in said and str(tmp_path / "made") in said
    assert any((tmp_path / "made").rglob("*.cubin"))
