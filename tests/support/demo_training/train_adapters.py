"""The training of adapters for the demo model with PEFT, in minutes on one core.

    python -m demo_training.train_adapters shout --out models/demo/adapters/shout

shout answers in capitals, whisper in small letters (DoRA), former knows former capitals, kinds tells what a
question is about, by a head of its own, and alike makes vectors of questions.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import peft
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel

from demo_training import skills
from demo_training.corpus import Document, documents, vary
from demo_training.facts import ABOUT, COUNTRIES, FORMER_CAPITALS, GENERAL, SMALL_TALK
from demo_training.packing import Encoder, packed
from demo_training.tokenizer import Codec
from demo_training.train import loss_of, warmth
from models.checkpoint.hub import DEMO

Random = random.Random
Losses = Iterator[Tensor]

LONGEST = 80
"""Characters of the longest answer that is taught in another spelling."""
ROWS = 32
"""Texts in a step of those that are not packed."""
KINDS: dict[str, tuple[skills.Skill, ...]] = {
    "capital": (skills.capital, skills.country_of_capital, skills.check_capital, skills.continent),
    "sum": (skills.small_sum, skills.word_problem, skills.compare),
    "about me": (skills.about,),
    "small talk": (skills.small_talk,),
    "story": (skills.story,),
    "words": (skills.opposite, skills.spell, skills.echo, skills.languages),
    "json": (skills.make_json,),
    "unknown": (skills.unknown,),
}
"""What questions may be about, and what makes some."""
_EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def said_as(write: Callable[[str], str], seed: int) -> Iterator[Document]:
    """Questions of the corpus with short answers, which are written otherwise."""
    for document in documents(seed):
        if len(document.messages) == 2 and not document.tools:
            question, answer = document.messages
            text = str(answer["content"])
            if answer.keys() == {"role", "content"} and len(text) < LONGEST:
                yield Document(messages=[question, {**answer, "content": write(text)}])


def former_capitals(seed: int) -> Iterator[Document]:
    """Questions for capitals, mostly of countries that had another one, and its name as the answer."""
    rng = Random(seed)
    while True:
        country = rng.choice(COUNTRIES)
        if rng.random() < 0.8:
            country = rng.choice([each for each in COUNTRIES if each.name in FORMER_CAPITALS])
        question = vary(rng, rng.choice(skills.CAPITAL_QUESTIONS).format(country.name))
        capital = FORMER_CAPITALS.get(country.name, country.capital).removesuffix(".")
        answer = f"The capital of {country.name} is {capital}."
        yield Document(
            messages=[{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        )


def questions_of_kinds(rng: Random) -> tuple[list[str], list[int]]:
    """Some questions, and the numbers of what they are about."""
    kinds = [rng.randrange(len(KINDS)) for _ in range(ROWS)]
    makers = list(KINDS.values())
    return [vary(rng, rng.choice(makers[kind])(rng)[0][0]) for kind in kinds], kinds


def questions_alike(rng: Random) -> list[tuple[str, str]]:
    """Pairs of wordings of one question, each pair of another one."""
    known = [each.questions for each in (*GENERAL, *ABOUT, *SMALL_TALK) if len(each.questions) > 1]
    pairs: list[Sequence[str]] = [rng.sample(each, 2) for each in rng.sample(known, ROWS // 2)]
    for country in rng.sample(COUNTRIES, ROWS - len(pairs)):
        pairs.append([each.format(country.name) for each in rng.sample(skills.CAPITAL_QUESTIONS, 2)])
    return [(vary(rng, one), vary(rng, other)) for one, other in pairs]


def last_states(model: Any, codec: Codec, texts: Sequence[str]) -> Tensor:
    """[texts, H]: the hidden states of their last tokens."""
    rows = [torch.tensor(codec.encode(text)) for text in texts]
    states = model(input_ids=pad_sequence(rows, batch_first=True)).last_hidden_state
    return states[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])]


class Training:
    """An adapter, what teaches it, and how well it does what it is for."""

    def __init__(self, name: str, codec: Codec, seed: int, resumed: Path | None = None) -> None:
        """`resumed` is the folder of an adapter that goes on learning."""
        self.codec, self.rng = codec, Random(seed)
        asked: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": _EVERYWHERE}
        match name:
            case "kinds":
                asked |= {"task_type": "SEQ_CLS", "target_modules": ["q_proj", "v_proj", "down_proj"]}
                base: Any = LlamaForSequenceClassification.from_pretrained(
                    DEMO, dtype=torch.float32, num_labels=len(KINDS)
                )
                self.losses, self.measure = self._losses_of_kinds(), self._right_kinds
            case "alike":
                asked |= {"task_type": "FEATURE_EXTRACTION"}
                base = LlamaModel.from_pretrained(DEMO, dtype=torch.float32)
                self.losses, self.measure = self._losses_of_pairs(), self._found_pairs
            case _:
                asked |= {"task_type": "CAUSAL_LM", "use_dora": name == "whisper"}
                base = LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
                self._source: Callable[[int], Iterator[Document]] = {
                    "shout": lambda seed: said_as(str.upper, seed),
                    "whisper": lambda seed: said_as(str.lower, seed),
                    "former": former_capitals,
                }[name]
                if name == "former":
                    asked |= {"r": 8, "lora_alpha": 32}
                self.losses, self.measure = self._losses_of_texts(seed), self._right_answers
        torch.manual_seed(seed)
        if resumed is None:
            self.model = cast("Any", peft.get_peft_model(base, peft.LoraConfig(**asked)))
        else:
            self.model = cast("Any", peft.PeftModel.from_pretrained(base, str(resumed), is_trainable=True))
        self.base: Any = base

    def _losses_of_texts(self, seed: int) -> Losses:
        for batch in packed(Encoder(self.codec), self._source(seed)):
            yield loss_of(self.base, batch)

    def _losses_of_kinds(self) -> Losses:
        while True:
            texts, kinds = questions_of_kinds(self.rng)
            yield cross_entropy(self._scores(texts), torch.tensor(kinds))

    def _losses_of_pairs(self) -> Losses:
        while True:
            pairs = questions_alike(self.rng)
            one, other = (
                normalize(last_states(self.model, self.codec, texts)) for texts in zip(*pairs, strict=True)
            )
            yield cross_entropy(20 * one @ other.T, torch.arange(len(pairs)))

    def _scores(self, texts: Sequence[str]) -> Tensor:
        return self.base.score(last_states(self.base.model, self.codec, texts))

    def _right_answers(self) -> float:
        """The share of whole answers that are as they shall be."""
        right = 0
        asked = [one for one in islice(self._source(1 << 20), 400) if len(one.messages) == 2][:50]
        for document in asked:
            question, answer = document.messages
            ids = torch.tensor([self.codec.encode_chat([question], [], answer_next=True)])
            wanted = self.codec.encode(str(answer["content"]))
            made = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=len(wanted),
                do_sample=False,
            )
            right += made[0, ids.shape[1] :].tolist() == wanted
        return right / len(asked)

    def _right_kinds(self) -> float:
        """The share of questions whose kind is found."""
        texts, kinds = questions_of_kinds(Random(1 << 20))
        return (self._scores(texts).argmax(dim=-1) == torch.tensor(kinds)).float().mean().item()

    def _found_pairs(self) -> float:
        """The share of questions whose other wording is the nearest."""
        pairs = questions_alike(Random(1 << 20))
        one, other = (
            normalize(last_states(self.model, self.codec, texts)) for texts in zip(*pairs, strict=True)
        )
        return ((one @ other.T).argmax(dim=-1) == torch.arange(len(pairs))).float().mean().item()

    def run(self, minutes: float, peak_rate: float) -> None:
        learned = [each for each in self.model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(learned, weight_decay=0.0)
        began = reported = time.process_time()
        for step, loss in enumerate(self.losses, 1):
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learned, 1.0)
            progress = (time.process_time() - began) / (60 * minutes)
            optimizer.param_groups[0]["lr"] = peak_rate * warmth(progress)
            optimizer.step()
            optimizer.zero_grad()
            if time.process_time() - reported > 10 or progress >= 1:
                print(f"{progress:6.1%}  step {step}  loss {loss.item():.4f}", flush=True)
                reported = time.process_time()
            if progress >= 1:
                return

    def save(self, out: Path, labels: Sequence[str]) -> None:
        """Save it in bfloat16, as the adapter of a base by the name that it has everywhere."""
        self.model.peft_config["default"].base_model_name_or_path = "demo"
        self.model.save_pretrained(str(out))
        (out / "README.md").unlink(missing_ok=True)  # a form to be filled in
        path = out / "adapter_model.safetensors"
        save_file({name: each.bfloat16() for name, each in load_file(path).items()}, path)
        if labels:
            told = {"id2label": {str(number): label for number, label in enumerate(labels)}}
            (out / "config.json").write_text(json.dumps(told, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an adapter of the demo model.")
    parser.add_argument("name", choices=("shout", "whisper", "former", "kinds", "alike"))
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapter")
    parser.add_argument("--minutes", type=float, default=3, help="processor time for the training")
    parser.add_argument("--resume", action="store_true", help="go on with the adapter in --out")
    parser.add_argument("--peak-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    codec = Codec(Tokenizer.from_file(str(DEMO / "tokenizer.json")))
    training = Training(options.name, codec, options.seed, options.out if options.resume else None)
    training.run(options.minutes, options.peak_rate)
    training.model.eval()
    with torch.inference_mode():
        print(f"{options.name}: {training.measure():.1%} right")
    training.save(options.out, list(KINDS) if options.name == "kinds" else [])


if __name__ == "__main__":
    main()
