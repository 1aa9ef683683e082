"""The work that is compared: which requests, how many at once, to which model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.bench.serve_options import LoadOptions

GENERATIVE = ("llama-135m", "qwen3-0.6b")
MIXTURE = "granite-moe-1.3b"
HYBRID = "qwen3.5-0.8b"
MODELS = (*GENERATIVE, MIXTURE, HYBRID, "minilm", "tiny-2m")
PARTS = ("generation", "embeddings", "overhead", "startup", "memory")


@dataclass(frozen=True)
class Model:
    """A checkpoint as it is served."""

    name: str
    dtype: str = "bfloat16"
    cache_mib: int = 1536
    """The KV cache holds 32 sequences of 256 + 64 tokens of the larger model; all sides must fit at once."""

    @property
    def title(self) -> str:
        return f"{self.name}, {self.dtype}"

    @property
    def embeds(self) -> bool:
        return self.name == "minilm"


@dataclass(frozen=True)
class Case:
    title: str
    concurrency: int
    fields: dict[str, Any]
    texts: tuple[int, int] | None = None
    """Tokens of each text and texts in a request, for work that sends texts instead of token ids."""

    @property
    def tokens(self) -> int:
        """Tokens of a sequence that is generated."""
        return self.fields.get("random_input_len", 0) + self.fields.get("random_output_len", 0)

    def options(self, url: str, round: int, *, quick: bool, file: Path | None = None) -> LoadOptions:
        """The benchmark's options for this work; `file` holds the texts."""
        fields = dict(self.fields)
        if file is not None:
            fields |= {"dataset_name": "custom", "dataset_path": str(file)}
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
    return [case(256, 64, 1, 4), case(256, 64, 8, 16), case(256, 64, 32, 64), case(1024, 8, 1, 4)]


def embeddings(quick: bool) -> list[Case]:
    def case(tokens: int, batch: int, concurrency: int) -> Case:
        each = f"{batch} texts" if batch > 1 else "one text"
        title = f"{tokens} tokens, {each} a request, {concurrency} at once"
        return Case(title, concurrency, {"endpoint": "embeddings", "duration": 5.0}, (tokens, batch))

    sizes = (32,) if quick else (32, 128, 512)
    return [case(n, batch, at_once) for n in sizes for batch, at_once in ((1, 1), (1, 8), (1, 32), (32, 1))]


def overhead(quick: bool) -> list[Case]:
    def case(written: int, concurrency: int) -> Case:
        lengths = {"random_input_len": 16, "random_output_len": written, "duration": 5.0}
        return Case(f"16 in, {written} out, {concurrency} at once", concurrency, lengths)

    return [case(written, at_once) for written in (1, 32) for at_once in ((32,) if quick else (1, 32, 128))]


def models(part: str) -> list[Model]:
    """The models with which each part is measured."""
    match part:
        case "generation":
            return [Model(name) for name in (*GENERATIVE, MIXTURE, HYBRID)]
        case "embeddings":
            return [Model("minilm", "float32"), Model("minilm", "bfloat16")]
        case "startup":
            return [*map(Model, GENERATIVE), Model("minilm", "float32")]
        case "memory":
            return [Model("tiny-2m"), Model("qwen3-0.6b")]
        case _:
            return [Model("tiny-2m")]


CASES = {"generation": generation, "embeddings": embeddings, "overhead": overhead}
