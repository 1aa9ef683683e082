"""The work that is compared: which requests, how many at once, to which model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.bench.options import LoadOptions

GENERATIVE = ("llama-135m", "qwen3-0.6b")
PARTS = ("generation", "embeddings", "overhead", "startup", "memory")


@dataclass(frozen=True)
class Model:
    """A checkpoint as it is served."""

    name: str
    dtype: str = "bfloat16"

    @property
    def title(self) -> str:
        return f"{self.name}, {self.dtype}"

    def serve_options(self) -> tuple[str, ...]:
        limit = () if self.name == "minilm" else ("--max-model-len", "2048")
        return ("--dtype", self.dtype, *limit)


@dataclass(frozen=True)
class Case:
    title: str
    concurrency: int
    fields: dict[str, Any]

    def options(self, url: str, round: int, *, quick: bool) -> LoadOptions:
        fields = dict(self.fields)
        if quick and "num_prompts" in fields:
            fields["num_prompts"] = max(2, min(self.concurrency, fields["num_prompts"]))
        elif quick:
            fields["duration"] = 1.0
        return LoadOptions(
            base_url=url,
            model="m",
            max_concurrency=(self.concurrency,),
            num_warmups=1,
            seed=round,  # new texts in each round: no prefix cache knows them, on either side
            ignore_eos=True,
            temperature=0.0,
            **fields,
        )


def generation(quick: bool) -> list[Case]:
    def case(read: int, written: int, concurrency: int, prompts: int) -> Case:
        lengths = {"random_input_len": read, "random_output_len": written, "num_prompts": prompts}
        return Case(f"{read} in, {written} out, {concurrency} at once", concurrency, lengths)

    if quick:
        return [case(64, 16, 1, 2), case(64, 16, 8, 8)]
    return [case(256, 64, 1, 6), case(256, 64, 8, 24), case(256, 64, 32, 64), case(1024, 8, 1, 8)]


def embeddings(quick: bool) -> list[Case]:
    def case(tokens: int, batch: int, concurrency: int) -> Case:
        texts = {"random_input_len": tokens, "random_batch_size": batch, "random_vocab_size": 30000}
        each = f"{batch} texts" if batch > 1 else "one text"
        title = f"{tokens} tokens, {each} a request, {concurrency} at once"
        return Case(title, concurrency, {"endpoint": "embeddings", "duration": 5.0, **texts})

    sizes = (32,) if quick else (32, 128, 512)
    return [case(n, batch, at_once) for n in sizes for batch, at_once in ((1, 1), (1, 8), (1, 32), (32, 1))]


def overhead(quick: bool) -> list[Case]:
    def case(written: int, concurrency: int) -> Case:
        lengths = {"random_input_len": 16, "random_output_len": written, "duration": 5.0}
        return Case(f"16 in, {written} out, {concurrency} at once", concurrency, lengths)

    return [case(written, at_once) for written in (1, 32) for at_once in ((32,) if quick else (1, 32, 128))]


def models(part: str) -> list[Model]:
    """Which models a part loads requests on."""
    match part:
        case "generation":
            return [Model(name) for name in GENERATIVE]
        case "embeddings":
            return [Model("minilm", "float32"), Model("minilm", "bfloat16")]
        case _:
            return [Model("tiny-2m")]


CASES = {"generation": generation, "embeddings": embeddings, "overhead": overhead}
