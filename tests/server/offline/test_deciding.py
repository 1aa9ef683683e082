"""Decisions of tiny models: as transformers computes them from the same prompts, and the same bits however
they are asked for."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tiny import hf_logits, tiny_checkpoint
from transformers import AutoTokenizer

from facet import LLM
from server.errors import BadRequest
from server.reading.decisions import read_decisions
from server.requests.decisions import INTRODUCTION, Question, wordings
from server.schemas.decisions.openai_decisions import Decision, DecisionRequest

STATE = "The quick brown fox jumps over the lazy dog, and then the dog thinks about the fox. " * 3
TRUE = {"type": "predicate", "name": "fox", "instructions": "There is a fox."}
TEAM = {
    "type": "choice",
    "name": "who",
    "instructions": "Who jumps?",
    "choices": [{"value": "the fox", "description": "quick"}, {"value": "the dog"}, {"value": "the table"}],
}
MOOD = {
    "type": "score",
    "name": "mood",
    "instructions": "How quick?",
    "levels": [{"label": "slow"}, {"label": "so"}, {"label": "quick"}],
}
MANY = {
    "type": "choice",
    "name": "many",
    "instructions": "Which one?",
    "choices": [{"value": f"chair {number}"} for number in range(27)] + [{"value": "chair"}],
}
ALL = [TRUE, TEAM, MOOD, MANY]


@pytest.fixture(scope="module", params=["Qwen3ForCausalLM", "Gemma2ForCausalLM"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", kv_cache_memory_bytes="32m", cpu_threads="1") as llm:
        yield llm


def asked_text(folder: Path, text: str) -> list[int]:
    """The prompt as the template of the checkpoint writes it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = [{"role": "user", "content": f"{STATE}\n\n{INTRODUCTION}{text}"}]
    return tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=True, return_dict=False)


def computed(folder: Path, question: Question, ends: Sequence[int]) -> list[float]:
    """The probabilities of a question's options, each label read alone behind the prompt, token by token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    orders: list[torch.Tensor] = []
    for worded in wordings(question):
        prompt = asked_text(folder, worded.text)
        labels = [tokenizer.encode(label, add_special_tokens=False) for label in worded.labels]
        found: list[torch.Tensor] = []
        for own in labels:
            others = [each for each in labels if each != own]
            size = next(
                (n for n in range(1, len(own) + 1) if all(each[:n] != own[:n] for each in others)), None
            )
            read = own[:size]
            logprobs = hf_logits(folder, [*prompt, *read]).log_softmax(-1)[len(prompt) - 1 :]
            total = sum(logprobs[at, token] for at, token in enumerate(read))
            if size is None:  # others begin with it
                total = total + logprobs[len(read), list(ends)].logsumexp(-1)
            found.append(torch.as_tensor(total))
        orders.append(torch.stack(found).softmax(-1))
    return torch.stack(orders).mean(0).tolist()


def test_probabilities_are_those_of_transformers_for_the_same_prompts(llm: LLM, folder: Path) -> None:
    [decision] = llm.decide(STATE, ALL)
    body = DecisionRequest.model_validate({"input": STATE, "questions": ALL})
    ends = llm.frontend.facts.eos_token_ids
    expected = [computed(folder, question, ends) for question in body.asked]
    first, *others = decision.answers
    assert first.probability == pytest.approx(expected[0][0], abs=2e-5)
    for answer, known in zip(others, expected[1:], strict=True):
        assert isinstance(answer.probabilities, list)
        assert [each.probability for each in answer.probabilities] == pytest.approx(known, abs=2e-5)
    assert len({round(each, 3) for each in expected[3]}) > 3


def test_prompts_are_what_the_template_writes_of_state_and_question(llm: LLM, folder: Path) -> None:
    body = DecisionRequest.model_validate({"input": STATE, "questions": [TEAM]})
    read = read_decisions(body, llm.frontend.reading_context)
    state = read.state.tokens
    decode = AutoTokenizer.from_pretrained(folder).decode
    for asked, worded in zip(read.asked, wordings(body.asked[0]), strict=True):
        assert decode([*state, *asked.tokens]) == decode(asked_text(folder, worded.text))
    assert decode(state).endswith(f"{STATE}\n\n{INTRODUCTION}")


def bits(decision: Decision) -> dict[str | None, bytes]:
    return {each.name: msgspec.json.encode(each) for each in decision.answers}


def test_a_question_has_the_same_bits_alone_in_any_order_and_beside_other_texts(llm: LLM) -> None:
    [decision] = llm.decide(STATE, ALL)
    together = bits(decision)
    assert bits(llm.decide(STATE, ALL[::-1])[0]) == together
    for question in ALL:
        assert bits(llm.decide(STATE, [question])[0]).items() <= together.items()
    several = llm.decide(["Hello, hello!", STATE, "import this"], ALL)
    assert bits(several[1]) == together and bits(several[0]) != together


def test_exchanged_options_keep_their_probabilities(llm: LLM) -> None:
    def weighed(question: dict[str, Any]) -> dict[object, float]:
        [answer] = llm.decide(STATE, [question])[0].answers
        assert isinstance(answer.probabilities, list)
        return {each.value: each.probability for each in answer.probabilities}

    for question in (TEAM, MANY):
        choices: Any = question["choices"]
        exchanged = [choices[1], choices[0], *choices[:1:-1]]
        assert weighed({**question, "choices": exchanged}) == pytest.approx(weighed(question), abs=1e-6)


def test_a_state_that_is_asked_about_again_is_found_to_its_last_token(llm: LLM) -> None:
    state = f"Nobody has asked about this. {STATE}"
    body = DecisionRequest.model_validate({"input": state, "questions": [MOOD]})
    length = read_decisions(body, llm.frontend.reading_context).state.length
    first, again = (
        llm.decide(state, [asked])[0].usage.input_tokens_details.cached_tokens for asked in (TRUE, MOOD)
    )
    assert first < 64 and again == length and length % 32, "it ends within a block"


def test_what_cannot_be_asked_is_refused(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="give 2 to 255 choices"):
        llm.decide(STATE, [{**TEAM, "choices": []}])
