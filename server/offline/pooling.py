"""How `LLM`, `LLMEngine` and `AsyncLLM` turn prompts into texts to pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from server.offline.prompts import Prompt
from server.requests.facts import Facts
from server.requests.pooling import Item, PoolingParams, TextReader, Truncation, find_prompt
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a call for all of its texts. None leaves an option to the parameters of each text."""

    task: str | None = None
    prompt_name: str | None = None
    """The name of one of the model's instructions, which is written before each text."""
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None


def read_items(
    prompts: Sequence[Prompt],
    params: Sequence[PoolingParams],
    facts: Facts,
    tokenizer: Tokenizer,
    reading: ReadOptions = ReadOptions(),
) -> list[Item]:
    """Encodes texts for the engine, together if their parameters are equal. Raises BadRequest."""
    if all(one is params[0] or one == params[0] for one in params):
        return _read(prompts, params[0], facts, tokenizer, reading) if params else []
    return [
        item
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        for item in _read([prompt], one, facts, tokenizer, reading, index)
    ]


def _read(
    prompts: Sequence[Prompt],
    params: PoolingParams,
    facts: Facts,
    tokenizer: Tokenizer,
    reading: ReadOptions,
    first: int = 0,
) -> list[Item]:
    """`first` is the index of the first of these prompts in the call."""
    resolved = msgspec.structs.replace(params, task=reading.task or params.task).resolve(facts)
    keep = reading.truncate_prompt_tokens
    keep = params.truncate_prompt_tokens if keep is None else keep
    reader = TextReader(
        facts,
        tokenizer,
        Truncation.from_request(keep, reading.truncation_side, facts),
        find_prompt(reading.prompt_name, facts, resolved.task),
    )
    return reader.read([prompt.source for prompt in prompts], resolved, first)
