"""The options of streams beside other work: those of `facet bench serve`, and what runs beside them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec

from server.bench.serve_options import LoadOptions, check_load, read_values
from server.options.option_parsing import OptionDoc, OptionError, assemble, flag_of, options_of

_BESIDE = "Streams beside other work"
_BESIDE_DEFAULTS = {"random_input_len": 32, "random_output_len": 200, "ignore_eos": True}
"""Defaults of a plain load's options that are others with --beside."""
_NOT_BESIDE = (
    *("max_concurrency", "request_rate", "burstiness", "num_prompts", "duration", "num_warmups"),
    *("random_batch_size", "percentile_metrics"),
)
"""Options of a plain load that mean nothing with --beside."""


class MixedLoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    beside: Annotated[list[str], OptionDoc(_BESIDE, ("embeddings", "prompt", "bulk"))] = []
    """Measure how evenly streams run beside other work: clients that embed texts without pause, a long prompt
    in the middle of the streams, or both; bulk measures single texts to embed beside one request with very
    many."""
    streams: Annotated[int, OptionDoc(_BESIDE, least=1)] = 1
    """Streams at once."""
    rounds: Annotated[int, OptionDoc(_BESIDE, least=1)] = 3
    """How often everything is measured, beside and alone."""
    embed_base_url: Annotated[str | None, OptionDoc(_BESIDE)] = None
    """Address of the server that embeds, if it is another one."""
    embed_clients: Annotated[int, OptionDoc(_BESIDE, least=1)] = 2
    """Clients that embed without pause."""
    embed_batch_size: Annotated[int, OptionDoc(_BESIDE, least=1)] = 4
    """Texts in each of their requests."""
    embed_input_len: Annotated[int, OptionDoc(_BESIDE, least=1)] = 200
    """Tokens of each of these texts."""
    long_prompt_len: Annotated[int, OptionDoc(_BESIDE, least=1)] = 3000
    """Tokens of the long prompt, if the model takes so many."""
    bulk_batch_size: Annotated[int, OptionDoc(_BESIDE, least=1)] = 10000
    """Texts in the request of bulk, each of --random-input-len tokens."""


class BesideOptions(msgspec.Struct, frozen=True, kw_only=True):
    mixed: MixedLoadOptions = msgspec.field(default_factory=MixedLoadOptions)
    load: LoadOptions = msgspec.field(default_factory=LoadOptions)


def parse(arguments: Sequence[str], command: str) -> BesideOptions:
    values = read_values(arguments, command, options_of(BesideOptions))
    options = assemble(BesideOptions, {**_BESIDE_DEFAULTS, **values})
    check_load(options.load)
    _check_beside(options, values)
    return options


def _check_beside(options: BesideOptions, given: Collection[str]) -> None:
    """Raises OptionError if options do not go together; `given` are their fields."""
    kinds = options.mixed.beside
    if not kinds:
        raise OptionError("--beside says what runs beside the streams: embeddings, prompt or bulk")
    if "bulk" in kinds and len(kinds) > 1:
        raise OptionError("--beside bulk is measured by itself; name no other kind with it")
    if idle := [field for field in _NOT_BESIDE if field in given]:
        raise OptionError(f"{flag_of(idle[0])} means nothing with --beside; leave it out")
    if options.load.kind == "embeddings":
        raise OptionError("--beside reads streams: of --endpoint completions or chat")
