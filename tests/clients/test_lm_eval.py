"""The harness lm-eval as its own command: answers that are ranked, and answers that are generated.

It has an environment of its own, which the variable LM_EVAL names; its task is a file made here.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from live import LiveServer

COMMAND = os.environ.get("LM_EVAL", "lm_eval")
MODEL = Path(__file__).parents[2] / "models" / "demo"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
pytestmark = pytest.mark.timeout(900)  # it takes a minute to import what it needs
QUESTIONS = [
    {"text": "What is the capital of France?", "choices": [" Paris", " Xylophone"], "answer": 0},
    {"text": "What is the capital of Italy?", "choices": [" Xylophone", " Rome"], "answer": 1},
]
TASKS = {
    "ranked": "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\n",
    "written": "output_type: generate_until\ndoc_to_target: '{{choices[answer]}}'\n"
    "generation_kwargs: {until: ['\\n'], max_gen_toks: 20, temperature: 0}\n",
}


def evaluate(folder: Path, task: str, model: str, url: str, *more: str) -> dict[str, float]:
    """The scores of a task by lm-eval's model class for a route of the server."""
    if subprocess.run(["sh", "-c", f"command -v {COMMAND}"], check=False, capture_output=True).returncode:
        pytest.skip("lm-eval is not installed")
    (folder / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    (folder / f"{task}.yaml").write_text(
        f"task: {task}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}\n"
        f"test_split: test\ndoc_to_text: '{{{{text}}}}'\n{TASKS[task]}"
    )
    arguments = f"model=demo,base_url={url},num_concurrent=2,max_retries=1,max_length=512"
    command = [COMMAND, "--model", model, "--tasks", task, "--include_path", folder, *more]
    command += ["--output_path", folder / "out", "--model_args", f"{arguments},tokenizer={MODEL}"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, **OFFLINE, "HF_HOME": str(folder), "OPENAI_API_KEY": "-"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    [report] = (folder / "out").rglob("results_*.json")
    return json.loads(report.read_text())["results"][task]


def test_answers_are_ranked_by_their_log_probabilities(demo: LiveServer, tmp_path: Path) -> None:
    scores = evaluate(tmp_path, "ranked", "local-completions", f"{demo.url}/v1/completions")
    assert scores["acc,none"] == 1


def test_a_chat_is_generated(demo: LiveServer, tmp_path: Path) -> None:
    url = f"{demo.url}/v1/chat/completions"
    scores = evaluate(tmp_path, "written", "local-chat-completions", url, "--apply_chat_template")
    assert "exact_match,none" in scores
