"""What a newcomer may type wrongly: each command line gets one sentence that says what to do."""

import re
import shlex

import pytest

from server.run import commands
from server.run.commands import BAD_USAGE, FAILED
from worker import logs

AWAY = "--url http://localhost:1"

LINES = {
    "serve m --modle x": "there is no option --modle; did you mean --model?",
    "serve m --stream": "there is no option --stream; --help lists them",
    "serve m --tp 2": "there is no option --tp; did you mean -tp?",
    "serve m --port": "--port needs a value",
    "serve m --port abc": "--port: 'abc' is not a whole number",
    "serve m --port 99999": "--port: must be at most 65535, got 99999",
    "serve m --max-model-len lots": "'lots' is not a size; write for example 4096, 32k",
    "serve m --max-model-len 0": "--max-model-len: must be at least 1, got 0",
    "serve m --device-memory-utilization 95": "--device-memory-utilization: must be at most 1, got 95",
    "serve m -tp two": "-tp: 'two' is not a whole number",
    "serve m --dtype int8": "--dtype: 'int8' is not one of auto, bfloat16, float16, float32",
    "serve m --log-level loud": "--log-level: 'loud' is not one of critical, error, warning, info, debug",
    "serve m --task chat": "--task: 'chat' is not one of generate",
    "serve m --task draft": "--task: a draft model answers no requests; it belongs in --speculative-config",
    "serve m --enable-lora=yes": "--enable-lora is given without a value",
    "serve m --hf-overrides {rope": "'{rope' is not JSON; write an object such as {\"name\": 1}",
    "serve m --limit-mm-per-prompt image=2": "'image=2' is not JSON; write an object such as",
    "serve m --speculative-config.method magic": "method 'magic' is not supported; there are ngram",
    "serve m --api-key ''": "--api-key: an empty key protects nothing; leave it out or give one",
    "serve m --api-key-file /no/keys": "--api-key-file /no/keys: there is no such file",
    "serve m --ssl-keyfile /no/k": "--ssl-keyfile and --ssl-certfile go together; give both or none",
    "serve m --config /no/c.yaml": "--config /no/c.yaml cannot be read: No such file or directory",
    "serve m --tool-call-parser magic": "there is no parser named 'magic'. There are",
    "serve m --ctx-size 4096": "--ctx-size is --max-model-len here",
    "serve m --hf-token secret": "put it into the variable HF_TOKEN",
    "serve m --eplb-config {}": "--eplb-config is not supported: experts stay on the ranks that loaded them",
    "serve m --ignore-unknown-fields": "are let through, and --strict-fields refuses them",
    "serve m n --served-model-name x": "is for one model: give names in a file of --models",
    "serve m --memory 4G": "--memory is shared by several models: name them, or see --kv-cache-memory-bytes",
    "facet sevre m": "there is no command sevre; did you mean serve?",
    "facet --port 8000": "there is no command --port; facet --help lists all",
    "facet version --short": "facet version stands alone: leave out --short",
    "facet chat --ulr x": "there is no option --ulr; did you mean --url?",
    "facet chat --temperature hot": "--temperature: 'hot' is not a number",
    "facet chat --url ftp://x": "write for example http://localhost:8000",
    f"facet chat {AWAY}": "Connection refused; start the server, or name another with --url",
    "facet complete hi": "'hi' is too much; facet complete --help shows what it takes",
    "facet models --sugest": "there is no option --sugest; did you mean --suggest?",
    "facet load": "facet load: MODEL is missing; facet load --help shows how it is written",
    "facet embed": "name a model, `facet embed MODEL TEXT`, or a server with --url",
    "facet embed m a -i file": "texts are given as words and with -i: leave out one of them",
    "facet embed m a --dtpe float32": "there is no option --dtpe; did you mean --dtype?",
    f"facet embed {AWAY} hi": "Connection refused; start the server, or name another with --url",
    "facet keys ad": "'ad' is not one of add, remove, list",
    "facet keys list": "give --file, or set the variable FACET_API_KEY_FILE",
    "facet keys add --file /no/x name": "the file of keys /no/x cannot be changed: No such file or directory",
    "facet keys add --expires soon name": "--expires: 'soon' is not a date such as 2027-01-31",
    "facet run-batch -i /no/in -o out": "-i /no/in cannot be read: No such file or directory",
    "facet doctor now": "'now' is too much; facet doctor --help shows what it takes",
    "facet completion powershell": "'powershell' is not one of bash, zsh, fish",
    "facet launch vim": "'vim' is not one of claude-code, codex, opencode",
    "facet pull": "facet pull: MODEL is missing; facet pull --help shows how it is written",
    "facet list --all": "there is no option --all; facet list --help lists them",
    "facet bench serv": "facet bench serv is not there; facet bench serve is",
    "facet bench serve --backend magic": "--backend: 'magic' is not one of vllm, openai",
    "bench serve --num-prompts x": "--num-prompts: 'x' is not a whole number",
}


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "guard_stderr", lambda: None)
    monkeypatch.setattr(commands, "bind", lambda config: pytest.fail(f"it starts: {config}"))
    monkeypatch.delenv("FACET_API_KEY_FILE", raising=False)


@pytest.mark.parametrize("line", LINES)
def test_a_wrong_line_is_answered_with_a_sentence(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *arguments = shlex.split(line)
    assert commands.run(command, arguments) in (BAD_USAGE, FAILED)
    shown = capsys.readouterr()
    [told] = re.fullmatch(r"error: (.+)\n", re.sub(r"\n +", " ", shown.err)).groups()  # pyright: ignore
    assert LINES[line] in told and shown.out == ""
    assert "…" not in told and "Error" not in told and "Traceback" not in told
