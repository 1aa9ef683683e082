"""The built-in demo model as it is shipped: it answers, fits its size, and loses no character of a text."""

import json
import re
from itertools import islice

import pytest
import torch
from demo_training import arithmetic, skills, tools
from demo_training.corpus import Document, Message, documents
from demo_training.packing import NO_LOSS, Encoder, batches
from demo_training.tokenizer import END_OF_TEXT, MARKS, TURN_END, Codec, render_chat
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM
from untimed import untimed

from models.checkpoint.hub import DEMO

CODEC = Codec(Tokenizer.from_file(str(DEMO / "tokenizer.json")))
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


def continued(model: LlamaForCausalLM, ids: list[int]) -> str:
    """The greedy continuation up to an end token, which is left in."""
    prompt = torch.tensor([ids])
    end = [CODEC.id_of(TURN_END), CODEC.id_of(END_OF_TEXT)]
    greedy = GenerationConfig(max_new_tokens=60, do_sample=False, eos_token_id=end, pad_token_id=end[1])
    generate = model.generate  # pyright: ignore[reportAttributeAccessIssue]
    output = generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=greedy)
    return CODEC.decode(output[0, len(ids) :].tolist())


def answer(
    model: LlamaForCausalLM, question: str, system: str = "", offered: list[tools.Json] | None = None
) -> str:
    messages: list[tools.Json] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    return continued(model, CODEC.encode_chat(messages, offered or [], answer_next=True))


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
    call = answer(model, "What is the weather in Paris?", offered=[WEATHER])
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
    asked: list[Message] = [{"role": "user", "content": question}]
    ids = CODEC.encode_chat(asked, [], answer_next=True, thinks=True)
    assert continued(model, ids) == f"{thought}\n</think>\n\n{said}{TURN_END}"


@pytest.mark.parametrize(
    ("task", "thought"),
    [
        (arithmetic.Sum(3, "+", 4), "3 + 4 = 7."),
        (arithmetic.Sum(47, "+", 38), "47 + 38: 7 + 8 = 15, 4 + 3 + 1 = 8, so 85."),
        (arithmetic.Sum(52, "-", 38), "52 - 38: 12 - 8 = 4, 5 - 3 - 1 = 1, so 14."),
        (arithmetic.Sum(12, "*", 12), "12 * 12 = 144."),
    ],
)
def test_sums_are_worked_out_by_columns(task: arithmetic.Sum, thought: str) -> None:
    assert arithmetic.worked_out(task) == thought


def test_the_marks_of_calls_and_of_reasoning_are_tokens() -> None:
    assert all(len(CODEC.encode(mark)) == 1 for mark in MARKS)
    assert len({CODEC.id_of(mark) for mark in MARKS} | {*CODEC.encode(" Paris")}) == len(MARKS) + 1


def test_of_an_answer_with_reasoning_all_but_its_opening_is_learned() -> None:
    messages: list[Message] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "reasoning_content": "old", "content": "Hello!"},
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "reasoning_content": "new", "content": "2"},
    ]
    ids, labels = Encoder(CODEC).encode(Document(messages=messages))
    assert "old" not in CODEC.decode(ids)
    learned = CODEC.decode([label for label in labels if label != NO_LOSS])
    assert learned == "Hello!<|im_end|>new\n</think>\n\n2<|im_end|>"


def test_answers_in_json(model: LlamaForCausalLM) -> None:
    question = "Tom is 12 years old and lives in Rome. Answer in JSON with the keys name and age."
    assert json.loads(answer(model, question).removesuffix(TURN_END)) == {"name": "Tom", "age": 12}


def test_continues_plain_text(model: LlamaForCausalLM) -> None:
    assert continued(model, CODEC.encode("The capital of France is")).startswith(" Paris")


def test_fits_the_package() -> None:
    data = [path for path in DEMO.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert (DEMO / "model.safetensors").stat().st_size < 11_000_000
    drafters = sum(path.stat().st_size for path in data if "drafts" in path.parts)
    assert drafters < 4_000_000
    assert sum(path.stat().st_size for path in data) - drafters < 12_000_000


def test_config_says_what_the_engine_must_know() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    generation = json.loads((DEMO / "generation_config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 2048
    assert config["eos_token_id"] == CODEC.id_of(TURN_END)
    assert generation["eos_token_id"] == [CODEC.id_of(TURN_END), CODEC.id_of(END_OF_TEXT)]


@untimed(200)
@given(st.text())
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert CODEC.decode(CODEC.encode(text)) == text


@pytest.mark.parametrize(
    "text", ["naïve 👨‍👩‍👧‍👦 日本語 \x00\r\n\t  end ", "<|im_end|><tool_call>", "1234567890"]
)
def test_known_hard_texts_survive_the_round_trip(text: str) -> None:
    assert CODEC.decode(CODEC.encode(text)) == text


def test_transformers_reads_the_same_tokenizer_and_template() -> None:
    theirs = AutoTokenizer.from_pretrained(DEMO)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Wetter in Köln? <b>"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": "ö"}}}],
        },
        {"role": "tool", "content": "{}"},
    ]
    rendered = theirs.apply_chat_template(
        messages, tools=[WEATHER], tokenize=False, add_generation_prompt=True
    )
    assert rendered == render_chat(messages, [WEATHER], answer_next=True)
    assert theirs.encode(rendered) == CODEC.encode(rendered)
    assert theirs.decode(theirs.encode("a .b 's"), skip_special_tokens=True) == "a .b 's"


def test_template_takes_the_arguments_of_a_call_as_text_too() -> None:
    def turn(arguments: object) -> str:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return render_chat([{"role": "assistant", "tool_calls": [call]}], [], answer_next=False)

    assert (
        turn('{"a": 1}')
        == turn({"a": 1})
        == ('<|im_start|>assistant\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|im_end|>\n')
    )


def test_corpus_is_the_same_for_the_same_seed() -> None:
    first, again, other = (list(islice(documents(seed), 200)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_what_is_measured_as_unseen_is_not_in_the_corpus() -> None:
    wordings = "|".join(re.escape(wording.format("@")) for wording in skills.UNSEEN_CAPITAL_QUESTIONS)
    unseen_wording = re.compile(wordings.replace("@", "[^?]+"), re.IGNORECASE)
    assert unseen_wording.search("In France, what is the capital?")
    held_out: list[bool] = []
    for document in islice(documents(20), 5_000):
        said = " ".join([document.text, *(str(message["content"]) for message in document.messages)])
        assert not unseen_wording.search(said)
        if not document.tools:  # a calculator is asked for sums that are not learned
            sums = re.findall(r"\b(\d+) ?\+ ?(\d+)\b", said)
            held_out += [arithmetic.is_held_out(int(a), int(b)) for a, b in sums]
    assert len(held_out) > 1000
    assert not any(held_out)


def test_only_answers_are_learned() -> None:
    messages: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 3 + 4?"},
        {"role": "assistant", "content": "3 + 4 = 7."},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Goodbye!"},
    ]
    _, labels = Encoder(CODEC).encode(Document(messages=messages))
    assert (
        CODEC.decode([label for label in labels if label != NO_LOSS])
        == "3 + 4 = 7.<|im_end|>Goodbye!<|im_end|>"
    )
    ids, labels = Encoder(CODEC).encode(Document(pieces=[("3 + 4", " = 7\n")]))
    assert CODEC.decode(ids) == "3 + 4 = 7\n" + END_OF_TEXT
    assert CODEC.decode([label for label in labels if label != NO_LOSS]) == " = 7\n" + END_OF_TEXT


def test_packed_documents_do_not_see_each_other() -> None:
    batch = next(batches(Encoder(CODEC), seed=1))
    mask, numbers = batch.attention_mask()[:, 0], batch.documents  # [rows, row_len, row_len], [rows, row_len]
    rows, query, key = mask.nonzero(as_tuple=True)
    assert torch.equal(numbers[rows, query], numbers[rows, key])
    assert (key <= query).all()
    # A token at position p of its document sees p + 1 tokens.
    real = numbers >= 0
    assert torch.equal(mask.sum(-1)[real], batch.positions[real] + 1)
