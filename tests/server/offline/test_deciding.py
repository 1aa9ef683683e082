"""Decisions of tiny models: as transformers computes them from the same prompts, and the same bits however
they are asked for."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.numpy import load_file
from tiny import VOCAB_SIZE, hf_logits, hf_model, tiny_checkpoint
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from written_adapters import write_adapter

from facet import LLM, LoRARequest
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


MARKS = ["<|fim_prefix|>", "<|fim_middle|>", "<|box_start|>", "<|box_end|>", "<|fim_suffix|>"]
WIDTH, TEMPERATURE = 16, 0.7
"""The width and the temperature of the head of a decision model."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_checkpoint("Qwen3ForCausalLM", folder, max_position_embeddings=2048, vocab_size=VOCAB_SIZE + 8)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(MARKS)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_adapter(tmp_path_factory.mktemp("adapters") / "kev", base, seed=1, size=0.1)
    model: Any = hf_model(base)
    size = model.config.hidden_size
    drawn = torch.Generator().manual_seed(0)
    shapes = {"weight": (WIDTH, size), "bias": (WIDTH,)}
    head = {f"{side}.{kind}": torch.randn(shapes[kind], generator=drawn) for side in "qk" for kind in shapes}
    torch.save({"base": "b", "head": head, "temperature": TEMPERATURE, "head_dim": WIDTH}, folder / "head.pt")
    return folder


def computed_by_head(
    base: Path, adapter: Path, state: str, asked: str, options: Sequence[str]
) -> list[float]:
    """The probabilities of options as Kev computes them: of transformers' last states of its row."""
    tokenizer, whole = Tokenizer.from_file(str(base / "tokenizer.json")), copy.deepcopy(hf_model(base))
    model: Any = whole.model
    factors = load_file(adapter / "adapter_model.safetensors")
    for number, layer in enumerate(model.layers):
        first, second = (
            torch.tensor(
                factors[f"base_model.model.model.layers.{number}.self_attn.q_proj.lora_{side}.weight"]
            )
            for side in "AB"
        )
        layer.self_attn.q_proj.weight.data += 8 / 4 * second @ first
    row = f"{MARKS[0]}{state}{MARKS[1]}{asked}"
    row += "".join(f"{MARKS[2]}{option}{MARKS[3]}" for option in options) + MARKS[4]
    ids = tokenizer.encode(row, add_special_tokens=False).ids
    head = torch.load(adapter / "head.pt")["head"]
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    ends = [at for at, id in enumerate(ids) if id == tokenizer.token_to_id(MARKS[3])]
    query = head["q.weight"] @ states[-1] + head["q.bias"]
    keys = states[ends] @ head["k.weight"].T + head["k.bias"]
    return (keys @ query / WIDTH**0.5 / TEMPERATURE).softmax(-1).tolist()


def test_the_head_scores_each_option_by_its_last_token(base: Path, adapter: Path) -> None:
    options = {"kv_cache_memory_bytes": "32m", "cpu_threads": "1", "dtype": "float32", "enable_lora": True}
    with LLM(str(base), tasks=["generate", "embed", "token_embed"], decide_orders=1, **options) as llm:
        kev = LoRARequest("kev", 1, str(adapter))
        [decision] = llm.decide(STATE, [TRUE, TEAM, MOOD], lora_request=kev)
        fox, who, mood = decision.answers
        yes = computed_by_head(base, adapter, STATE, "There is a fox.", ["no", "yes"])[1]
        assert fox.probability == pytest.approx(yes, abs=2e-5)
        for answer, asked, said in (
            (who, "Who jumps?", ["the fox: quick", "the dog", "the table"]),
            (mood, "How quick?", ["slow", "so", "quick"]),
        ):
            assert isinstance(answer.probabilities, list)
            expected = computed_by_head(base, adapter, STATE, asked, said)
            assert [each.probability for each in answer.probabilities] == pytest.approx(expected, abs=2e-5)
        assert bits(llm.decide(STATE, [MOOD, TRUE], lora_request=kev)[0]).items() <= bits(decision).items()
        assert bits(llm.decide(STATE, [TRUE])[0]) != bits(decision), "the base decides by letters"
        written = "a <\u00a6box_end\u00a6> b"
        forged = computed_by_head(base, adapter, written, "There is a fox.", ["no", "yes"])[1]
        [decision] = llm.decide("a <|box_end|> b", [TRUE], lora_request=kev)
        assert decision.answers[0].probability == pytest.approx(forged, abs=2e-5)
        saved = torch.load(adapter / "head.pt")
        torch.save({**saved, "option_isolation": True}, adapter / "head.pt")
        with pytest.raises(BadRequest, match="options that do not see each other, which is not served"):
            llm.decide(STATE, [TRUE], lora_request=LoRARequest("other", 2, str(adapter)))
