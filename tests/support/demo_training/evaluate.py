"""A measure of the demo model as it is shipped: the share of questions of each kind that it answers rightly.

python -m demo_training.evaluate --model models/demo
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaForCausalLM

from demo_training import arithmetic, skills, tools
from demo_training.corpus import Json, Message
from demo_training.facts import COUNTRIES
from demo_training.tokenizer import END_OF_TEXT, THOUGHT_END, TURN_END, Codec
from models.checkpoint.hub import DEMO

_BATCH = 64
_UNSEEN_SYSTEM = "You are a teacher for young children."
_LARGE_SUMS = "a + b up to 99, pairs never trained"
_THOUGHT = (
    "capital, trained wording",
    f"{_LARGE_SUMS}, unseen wordings",
    "tool call, exact",
    "answer from a tool's result, exact",
    "general facts",
)
"""The kinds that are asked a second time, with reasoning before the answer."""
_UNSEEN_TOPICS = (
    "knights and dragons",
    "the price of gold",
    "income tax",
    "garden design",
    "the French Revolution",
)


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    messages: list[Message]
    expected: str  # must occur in the answer
    tools: list[Json] = field(default_factory=list)
    thinks: bool = False

    def thinking(self) -> Case:
        """The same question, with reasoning before the answer."""
        return replace(self, kind=f"{self.kind}, thinking first", thinks=True)


def _asked(kind: str, question: str, expected: str, system: str = "") -> Case:
    before: list[Message] = [{"role": "system", "content": system}] if system else []
    return Case(kind, [*before, {"role": "user", "content": question}], expected)


def cases() -> list[Case]:
    rng = random.Random("evaluation")
    found = [*_capitals(), *_sums(rng), *_structured(rng), *_others(rng)]
    return found + [case.thinking() for case in found if case.kind in _THOUGHT]


def _capitals() -> list[Case]:
    found: list[Case] = []
    for country in COUNTRIES:
        plain = skills.CAPITAL_QUESTIONS[0].format(country.name)
        found.append(_asked("capital, trained wording", plain, country.capital))
        found.append(
            _asked("capital, lower case, no question mark", plain.lower().rstrip("?"), country.capital)
        )
        found.append(_asked("capital, upper case", plain.upper(), country.capital))
        found.append(_asked("capital, unseen system prompt", plain, country.capital, _UNSEEN_SYSTEM))
        found += [
            _asked("capital, unseen wordings", wording.format(country.name), country.capital)
            for wording in skills.UNSEEN_CAPITAL_QUESTIONS
        ]
        found.append(
            _asked("country of a capital", f"Which country has the capital {country.capital}?", country.name)
        )
    return found


def _sums(rng: random.Random) -> list[Case]:
    groups = {
        "a + b, both up to 20": [arithmetic.Sum(a, "+", b) for a in range(21) for b in range(21)],
        "a - b, both up to 20": [arithmetic.Sum(a, "-", b) for a in range(21) for b in range(a + 1)],
        "a * b, both up to 12": [arithmetic.Sum(a, "*", b) for a in range(13) for b in range(13)],
        _LARGE_SUMS: [
            arithmetic.Sum(a, "+", b)
            for a in range(21, 100)
            for b in range(21, 100)
            if arithmetic.is_held_out(a, b)
        ],
    }
    found: list[Case] = []
    for kind, sums in groups.items():
        for task in rng.sample(sums, min(len(sums), 150)):
            frame = rng.choice(arithmetic.UNSEEN_FRAMES)
            question = frame.format(sum=arithmetic.spoken(task, words=False))
            found.append(_asked(f"{kind}, unseen wordings", question, f" {task.result}."))
    for task in rng.sample(groups["a + b, both up to 20"], 100):
        question = f"What is {arithmetic.spoken(task, words=True)}?"
        found.append(_asked("a + b in words", question, f" is {arithmetic.in_words(task.result)}."))
    return found


def _structured(rng: random.Random) -> list[Case]:
    found: list[Case] = []
    for _ in range(100):
        use = rng.choice(tools.TOOLS)(rng)
        call = json.dumps({"name": use.name, "arguments": use.arguments}, ensure_ascii=False)
        asked: list[Message] = [{"role": "user", "content": use.question}]
        found.append(Case("tool call, exact", asked, f"<tool_call>{call}</tool_call>", [use.schema]))
        made = {"type": "function", "function": {"name": use.name, "arguments": use.arguments}}
        done: list[Message] = [
            {"role": "assistant", "content": "", "tool_calls": [made]},
            {"role": "tool", "content": use.result},
        ]
        found.append(Case("answer from a tool's result, exact", asked + done, use.answer, [use.schema]))
        ((question, answer),) = skills.make_json(rng)
        found.append(_asked("JSON answer, exact", question, answer))
    return found


def _others(rng: random.Random) -> list[Case]:
    found = [
        _asked("says that it does not know", f"Tell me about {topic}.", "do not know")
        for topic in _UNSEEN_TOPICS
    ]
    for _ in range(50):
        name = skills.made_up_word(rng).capitalize()
        messages: list[Message] = [
            {"role": "user", "content": f"My name is {name}."},
            {"role": "assistant", "content": f"Nice to meet you, {name}!"},
            {"role": "user", "content": "What is 2 plus 2?"},
            {"role": "assistant", "content": "2 plus 2 is 4."},
            {"role": "user", "content": "What is my name?"},
        ]
        found.append(Case("remembers a made-up name", messages, f"Your name is {name}."))
        for kind, skill in (("general facts", skills.general), ("about itself and the server", skills.about)):
            ((question, answer),) = skill(rng)
            found.append(_asked(kind, question, answer))
    return found


@torch.inference_mode()
def answer_ids(
    model: LlamaForCausalLM, codec: Codec, asked: list[Case]
) -> Iterator[tuple[list[int], list[int]]]:
    """Answer greedily: give each prompt and its answer, up to an end token if one comes within 80 tokens."""
    prompts = [
        codec.encode_chat(case.messages, case.tools, answer_next=True, thinks=case.thinks) for case in asked
    ]
    padding, end = codec.id_of(END_OF_TEXT), codec.id_of(TURN_END)
    greedy = GenerationConfig(max_new_tokens=80, do_sample=False, eos_token_id=end, pad_token_id=padding)
    rows = iter(prompts)
    while batch := list(islice(rows, _BATCH)):
        width = max(len(ids) for ids in batch)
        ids = torch.tensor([[padding] * (width - len(row)) + row for row in batch])  # [rows, width]
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])  # [rows, width]
        # The type checker wants a `self` for generate() that no model class is.
        generate = model.generate  # pyright: ignore[reportAttributeAccessIssue]
        output = generate(ids, attention_mask=mask, generation_config=greedy)
        for prompt, answer in zip(batch, output[:, width:].tolist(), strict=True):
            yield prompt, answer[: answer.index(end) + 1] if end in answer else answer


def answers(model: LlamaForCausalLM, codec: Codec, asked: list[Case]) -> list[str]:
    """Answer greedily in text."""
    found = [codec.decode(answer) for _, answer in answer_ids(model, codec, asked)]
    return [text.replace(END_OF_TEXT, "") for text in found]


def measure(model: LlamaForCausalLM, codec: Codec) -> str:
    """Count the right answers of each kind; right means the expected text, and then the end token."""
    asked = cases()
    score: dict[str, list[bool]] = {}
    for case, answer in zip(asked, answers(model, codec, asked), strict=True):
        _, thought, said = answer.rpartition(THOUGHT_END)
        right = bool(thought) == case.thinks and case.expected in said and said.endswith(TURN_END)
        score.setdefault(case.kind, []).append(right)
    rows = [f"| {kind} | {sum(right)} of {len(right)} |" for kind, right in score.items()]
    return "\n".join(("| questions | right |", "|---|---:|", *rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the demo model.")
    parser.add_argument("--model", type=Path, default=DEMO)
    folder: Path = parser.parse_args().model
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    print(measure(model.eval(), Codec(Tokenizer.from_file(str(folder / "tokenizer.json")))))


if __name__ == "__main__":
    main()
