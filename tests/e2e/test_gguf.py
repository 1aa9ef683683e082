"""A GGUF file served by the command: nothing is there but the file."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_pairs import Pair, Recipe, write_pair
from live import LiveServer, refusal, serving

from facet import LLM, SamplingParams
from worker.kernels.cpu.library import levels_here, open_library

pytestmark = pytest.mark.turns(4)

SIZES: dict[str, object] = {"hidden_size": 64, "intermediate_size": 96}
SMALL = ("--dtype", "float32", "--kv-cache-memory-bytes", "16M")
HERMES = (
    "{%- for message in messages -%}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{%- for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{%- endfor -%}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
PROMPT = "The quick brown fox jumps"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("gguf")
    fields = {"tokenizer.chat_template": HERMES, "tokenizer.ggml.add_bos_token": True, "general.file_type": 7}
    recipe = Recipe("Q8_0", parts=2, fields=fields)
    return write_pair(folder, "Qwen3ForCausalLM", recipe, **SIZES)


@pytest.fixture(scope="module")
def server(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    cache = tmp_path_factory.mktemp("cache")  # a server whose first start this is, but for compiled kernels
    (cache / "facet").mkdir()
    for level in levels_here()[:1]:
        shutil.copy2(open_library(level).path, cache / "facet")
    tasks = ("--tasks", "generate,embed")
    with serving(str(pair.file), *SMALL, *tasks, env={"XDG_CACHE_HOME": str(cache)}) as server:
        yield server


def post(server: LiveServer, path: str, **body: object) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.slow
def test_texts_and_vectors_are_those_of_the_checkpoint_that_it_means(server: LiveServer, pair: Pair) -> None:
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": "16m", "cpu_threads": 1}
    with LLM(str(pair.plain), **options) as plain:
        same_texts(server, plain)
        found = post(server, "/v1/embeddings", input=[PROMPT])["data"][0]["embedding"]
        [expected] = plain.embed([PROMPT])
        assert np.array(found) == pytest.approx(np.array(expected.outputs.embedding), abs=1e-3)


def same_texts(server: LiveServer, plain: LLM) -> None:
    # Inputs of quantized matrices are rounded, so that digits differ, and after some tokens texts.
    asked: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "logprobs": 1}
    answer = post(server, "/v1/completions", prompt=PROMPT, return_token_ids=True, **asked)["choices"][0]
    [expected] = plain.generate([PROMPT], SamplingParams(**asked))
    assert answer["prompt_token_ids"] == expected.prompt_token_ids
    assert answer["text"] == expected.outputs[0].text
    assert answer["logprobs"]["token_logprobs"] == [
        pytest.approx(expected.outputs[0].cumulative_logprob, abs=0.02)
    ]


def test_conversations_are_written_with_its_template(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    asked = {"messages": messages, "max_tokens": 3, "temperature": 0}
    answer = post(server, "/v1/chat/completions", **asked)
    written = "<|im_start|>user\nhello<|im_end|><|im_start|>assistant"  # Jinja's dashes take line ends away
    tokens = post(server, "/tokenize", prompt=written, add_special_tokens=False)["count"]
    assert answer["usage"]["prompt_tokens"] == tokens
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")


def test_it_embeds_and_tells_what_it_is(server: LiveServer) -> None:
    assert len(post(server, "/v1/embeddings", input=[PROMPT])["data"]) == 1
    [model] = server.get("/v1/models").json()["data"]
    assert (model["id"], model["quantization"]) == ("model", "gguf, Q8_0")
    assert "gguf, Q8_0: " in server.output() and "GiB of weights stand for" in server.output()
    assert "tool call parser hermes" in server.output()


@pytest.mark.slow
def test_a_folder_of_several_and_a_program(pair: Pair, tmp_path: Path) -> None:
    for part in pair.file.parent.glob("*.gguf"):
        shutil.copy(part, tmp_path / part.name.replace("model", "tiny-Q8_0"))
    (tmp_path / "tiny-Q4_0.gguf").write_bytes(b"GGUF")
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": "16m", "cpu_threads": 1}
    with pytest.raises(ValueError, match=r"several GGUF files: tiny-Q4_0\.gguf, tiny-Q8_0-00001.*--quant"):
        LLM(str(tmp_path), **options)
    with LLM(str(tmp_path), quant="Q8_0", quantization="gguf", **options) as llm:
        [answer] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4))
    assert len(answer.outputs[0].token_ids) == 4


@pytest.mark.slow
def test_half_of_a_file_is_refused_with_one_line(pair: Pair, tmp_path: Path) -> None:
    for part in pair.file.parent.glob("*.gguf"):
        shutil.copy(part, tmp_path / part.name)
    file = tmp_path / pair.file.name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    line = refusal(str(file), *SMALL)
    told = ("model-00001-of-00002.gguf", "cut off", "download it again")
    assert [word for word in told if word not in line] == [], line
