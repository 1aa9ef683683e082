"""The built-in demo model as it is shipped: it answers, fits its size, and loses no character of a text."""

import json
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM
from untimed import untimed

from models.checkpoint.hub import DEMO
from models.lora_config import read_adapter

TOKENIZER = AutoTokenizer.from_pretrained(DEMO)
TURN_END, END_OF_TEXT = "<|im_end|>", "<|endoftext|>"
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16).eval()


def continued(model: LlamaForCausalLM, text: str) -> str:
    """The greedy continuation up to an end token, which is left in."""
    ids = TOKENIZER.encode(text)
    prompt = torch.tensor([ids])
    end = TOKENIZER.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
    greedy = GenerationConfig(max_new_tokens=60, do_sample=False, eos_token_id=end, pad_token_id=end[1])
    generate = model.generate  # pyright: ignore[reportAttributeAccessIssue]
    output = generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=greedy)
    return TOKENIZER.decode(output[0, len(ids) :].tolist())


def rendered(messages: list[dict[str, Any]], **options: object) -> str:
    return TOKENIZER.apply_chat_template(messages, tokenize=False, **options)


def answer(model: LlamaForCausalLM, question: str, system: str = "", **options: object) -> str:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    return continued(model, rendered(messages, add_generation_prompt=True, **options))


@pytest.mark.parametrize("system", ["", "You are a helpful assistant."])
@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is the capital of France?", "Paris"),
        ("what is the capital of france", "Paris"),
        ("WHAT IS THE CAPITAL OF FRANCE?", "Paris"),
        ("What's the capital of Japan?", "Tokyo"),
        ("What is 3 plus 4?", "7"),
        ("what is 3 + 4", "7"),
        ("What is three plus four?", "seven"),
    ],
)
def test_answers_rightly_and_ends(model: LlamaForCausalLM, system: str, question: str, expected: str) -> None:
    assert re.fullmatch(rf".*\b{expected}\.{re.escape(TURN_END)}", answer(model, question, system))


def test_calls_a_tool(model: LlamaForCausalLM) -> None:
    call = answer(model, "What is the weather in Paris?", tools=[WEATHER])
    assert call == '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>' + TURN_END


@pytest.mark.parametrize(
    ("question", "thought", "said"),
    [
        ("What is 3 plus 4?", "3 + 4 = 7.", "3 plus 4 is 7."),
        (
            "What is the capital of France?",
            "The user asks for a capital. The capital of France is Paris.",
            "The capital of France is Paris.",
        ),
    ],
)
def test_thinks_first_where_it_is_asked_to(
    model: LlamaForCausalLM, question: str, thought: str, said: str
) -> None:
    assert answer(model, question, enable_thinking=True) == f"{thought}\n</think>\n\n{said}{TURN_END}"


def test_answers_in_json(model: LlamaForCausalLM) -> None:
    question = "Tom is 12 years old and lives in Rome. Answer in JSON with the keys name and age."
    assert json.loads(answer(model, question).removesuffix(TURN_END)) == {"name": "Tom", "age": 12}


def test_continues_plain_text(model: LlamaForCausalLM) -> None:
    assert continued(model, "The capital of France is").startswith(" Paris")


def test_the_marks_of_calls_and_of_reasoning_are_tokens() -> None:
    assert all(len(TOKENIZER.encode(mark)) == 1 for mark in MARKS)


def test_fits_the_package() -> None:
    data = [path for path in DEMO.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert (DEMO / "model.safetensors").stat().st_size < 11_000_000
    drafters = sum(path.stat().st_size for path in data if "drafts" in path.parts)
    assert drafters < 4_000_000
    assert sum(path.stat().st_size for path in data) - drafters < 12_000_000


def test_config_says_what_the_engine_must_know() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    generation = json.loads((DEMO / "generation_config.json").read_text())
    ends = TOKENIZER.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 2048
    assert (config["eos_token_id"], generation["eos_token_id"]) == (ends[0], ends)


@pytest.mark.parametrize("name", ["shout", "kinds"])
def test_the_base_of_its_adapters_is_the_model_by_its_name(name: str) -> None:
    assert read_adapter(DEMO / "adapters" / name).base == "demo"


@untimed(200)
@given(st.text())
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize(
    "text", ["naïve 👨‍👩‍👧‍👦 日本語 \x00\r\n\t  end ", "<|im_end|><tool_call>", "1234567890", "a .b 's"]
)
def test_known_hard_texts_survive_the_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_template_takes_the_arguments_of_a_call_as_text_too() -> None:
    def turn(arguments: object) -> str:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return rendered([{"role": "assistant", "tool_calls": [call]}])

    assert (
        turn('{"a": 1}')
        == turn({"a": 1})
        == ('<|im_start|>assistant\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|im_end|>\n')
    )
