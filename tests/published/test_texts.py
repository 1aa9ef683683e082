"""Published checkpoints of 4 bits write the texts that transformers writes with the same weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import published
import pytest
import torch
import transformers
from torch import Tensor

from facet import LLM, SamplingParams
from models.checkpoint.hub import DEMO
from server.offline.request_outputs import RequestOutput

LONG = (DEMO / "README.md").read_text()[:3000] + " Größe, naïve 東京 😀\n\n\tdef f(x): return x+1  # 12345"
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
PROMPTS = [
    *(
        "The capital of France is",
        "Once upon a time, in a small village",
        "def fibonacci(n):\n",
        "The quick brown fox",
    ),
    *(
        "In 1969, the first",
        "To make a good soup, you",
        "Dear Sir or Madam,\n\n",
        "Die Hauptstadt von Deutschland ist",
    ),
    *(
        "The three laws of motion are",
        "1, 2, 3, 4,",
        "Q: What is the boiling point of water?\nA:",
        "<html>\n<head>",
    ),
    *(
        "She opened the door and",
        "El perro corre por",
        "SELECT name FROM",
        "The most important thing about friendship is",
    ),
    *("Roses are red,", "import numpy as np\n", "In conclusion,", "東京は"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=64, logprobs=1, prompt_logprobs=0)


class Published(NamedTuple):
    file: Path
    reference: Any
    """transformers' model of the same weights, widened to float32."""
    tokenizer: Any

    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """The logarithms of probabilities [tokens, vocabulary] behind each of these tokens."""
        with torch.inference_mode():
            return self.reference(torch.tensor([tokens])).logits[0].log_softmax(-1)


@pytest.fixture(scope="module", params=("gemma3", "smollm2"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    is_gemma = request.param == "gemma3"
    file = published.gemma(tmp_path_factory.mktemp("gemma")) if is_gemma else published.short_named("smollm2")
    named = {"gguf_file": file.name}
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, **named
    )
    return Published(file, reference.eval(), transformers.AutoTokenizer.from_pretrained(file.parent, **named))


@pytest.fixture(scope="module")
def exact(model: Published) -> Iterator[LLM]:
    with LLM(str(model.file), dtype="float32", kv_cache_memory_bytes="256M", max_model_len=4096) as llm:
        yield llm


def apart(model: Published, outputs: Sequence[RequestOutput]) -> tuple[Tensor, Tensor]:
    """How far the log-probabilities of answers lie from transformers', and how far each of their tokens is
    below the one that transformers would have taken."""
    differences: list[Tensor] = []
    below: list[Tensor] = []
    for output in outputs:
        answer = output.outputs[0]
        said = model.logprobs([*output.prompt_token_ids, *answer.token_ids])
        rows, ids = said[len(output.prompt_token_ids) - 1 : -1], torch.tensor(answer.token_ids)
        expected = rows.gather(1, ids[:, None])[:, 0]
        assert answer.logprobs is not None
        found = [row[id].logprob for row, id in zip(answer.logprobs, answer.token_ids, strict=True)]
        differences.append((torch.tensor(found) - expected).abs())
        below.append(rows.max(-1).values - expected)
    return torch.cat(differences), torch.cat(below)


def test_in_float32_tokens_and_logprobs_are_those_of_transformers(model: Published, exact: LLM) -> None:
    outputs = exact.generate(PROMPTS, GREEDY)
    assert [each.prompt_token_ids for each in outputs] == [
        model.tokenizer(each)["input_ids"] for each in PROMPTS
    ]
    differences, below = apart(model, outputs)
    # Inputs of matrices have 16 bits, and some numbers of SmolLM2 are very large.
    assert below.max() < 5e-3 and differences.max() < 1e-2 and differences.mean() < 6e-4


def test_a_long_prompt_is_read_as_transformers_reads_it(model: Published, exact: LLM) -> None:
    """It is longer than Gemma's windows of 512 tokens, and read in chunks."""
    [output] = exact.generate([LONG], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    ids = model.tokenizer(LONG)["input_ids"]
    assert output.prompt_token_ids == ids and len(ids) > 700 and output.prompt_logprobs is not None
    found = [row[id].logprob for row, id in zip(output.prompt_logprobs[1:], ids[1:], strict=True) if row]
    expected = model.logprobs(ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    differences = (torch.tensor(found) - expected).abs()
    assert differences.max() < 2e-2 and differences.mean() < 1e-3


def test_a_stream_is_the_whole_answer_in_pieces(exact: LLM) -> None:
    whole = {
        id: output.outputs[0] for id, output in zip("012", exact.generate(PROMPTS[:3], GREEDY), strict=True)
    }
    for id in whole:
        exact.llm_engine.add_request(id, PROMPTS[int(id)], GREEDY)
    told = list[RequestOutput]()
    while exact.llm_engine.has_unfinished_requests():
        told += [each for each in exact.llm_engine.step() if isinstance(each, RequestOutput)]
    for id, answer in whole.items():
        pieces = [each.outputs[0] for each in told if each.request_id == id]
        assert len(pieces) > 3 and (pieces[-1].text, pieces[-1].token_ids) == (
            answer.text,
            answer.token_ids,
        )
        assert all(answer.text.startswith(piece.text) for piece in pieces)


def test_chats_are_written_by_the_template_of_the_file(model: Published, exact: LLM) -> None:
    if model.tokenizer.chat_template is None:
        pytest.skip("a base model has no chat template")
    [chat] = exact.chat(CHAT, GREEDY)
    asked = model.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert chat.prompt_token_ids == asked and "Paris" in chat.outputs[0].text


@pytest.mark.parametrize(
    "options", ({"speculative_config": {"method": "ngram"}}, {"pipeline_parallel_size": 2}), ids=str
)
def test_guesses_and_stages_change_no_token(model: Published, exact: LLM, options: dict[str, Any]) -> None:
    with LLM(
        str(model.file), dtype="float32", kv_cache_memory_bytes="256M", max_model_len=4096, **options
    ) as other:
        both = [each.generate(PROMPTS[:6], GREEDY) for each in (exact, other)]
    tokens = [[output.outputs[0].token_ids for output in outputs] for outputs in both]
    assert tokens[0] == tokens[1]


def test_as_served_by_default_only_rounding_differs(model: Published) -> None:
    """Inputs are rounded to 8 bits, as llama.cpp does: twice what transformers' own bfloat16 differs by."""
    with LLM(str(model.file), kv_cache_memory_bytes="256M", max_model_len=4096) as served:
        differences, below = apart(model, served.generate(PROMPTS, GREEDY))
    assert differences.mean() < 0.06 and below.max() < 0.5
