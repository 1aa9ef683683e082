"""`facet completion`: what a shell makes of the script."""

import shutil
import subprocess

import pytest

from server.run.commands import BAD_USAGE, TERMINAL, run


def completed(script: str, *typed: str) -> list[str]:
    """What bash offers for the last word of a command line."""
    words = " ".join(f"'{word}'" for word in typed)
    ask = f'{script}\nCOMP_WORDS=({words})\nCOMP_CWORD={len(typed) - 1}\n_facet\necho "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_words_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("facet", ["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "facet", "") == ["serve", "bench", "version", *TERMINAL]
    assert completed(script, "facet", "run-b") == ["run-batch"]
    assert completed(script, "facet", "run", "--max-mo") == ["--max-model-len"]
    assert completed(script, "facet", "run", "--system") == ["--system-prompt"]
    assert completed(script, "facet", "serve", "smol") == ["smollm2"]
    assert completed(script, "facet", "embed", "mini") == ["minilm"]
    assert completed(script, "facet", "embed", "--prompt-n") == ["--prompt-name"]
    assert completed(script, "facet", "keys", "") == ["add", "list", "remove", "--api-key-file", "--help"]
    assert completed(script, "facet", "chat", "a-file") == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("facet", ["completion", shell]) == 0
    assert "--max-model-len" in capsys.readouterr().out
    assert run("facet", ["completion", "tcsh"]) == BAD_USAGE
