"""The options of `facet bench serve --beside`, and the ones of a plain load that mean nothing there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from server.options.reader import Doc, OptionError

_BESIDE = "Streams beside other work"

KINDS = ("embeddings", "prompt", "bulk")

DEFAULTS: Mapping[str, object] = {"random_input_len": 32, "random_output_len": 200, "ignore_eos": True}
"""Defaults of a plain load's options that are others with --beside."""

_MEANINGLESS = (
    *("max_concurrency", "request_rate", "burstiness", "num_prompts", "duration", "num_warmups"),
    *("random_batch_size", "percentile_metrics", "plot"),
)


class BesideOptions(msgspec.Struct, frozen=True, kw_only=True):
    beside: Annotated[
        list[str],
        Doc(
            _BESIDE,
            "Measure how evenly streams run beside other work: clients that embed texts without pause, a "
            "long prompt in the middle of the streams, or both; bulk measures single texts to embed beside "
            "one request with very many.",
            KINDS,
        ),
    ] = []
    streams: Annotated[int, Doc(_BESIDE, "Streams at once.", least=1)] = 1
    rounds: Annotated[int, Doc(_BESIDE, "How often everything is measured, beside and alone.", least=1)] = 3
    embed_base_url: Annotated[
        str | None, Doc(_BESIDE, "Address of the server that embeds, if it is another one.")
    ] = None
    embed_clients: Annotated[int, Doc(_BESIDE, "Clients that embed without pause.", least=1)] = 2
    embed_batch_size: Annotated[int, Doc(_BESIDE, "Texts in each of their requests.", least=1)] = 4
    embed_input_len: Annotated[int, Doc(_BESIDE, "Tokens of each of these texts.", least=1)] = 200
    long_prompt_len: Annotated[
        int, Doc(_BESIDE, "Tokens of the long prompt, if the model takes so many.", least=1)
    ] = 3000
    bulk_batch_size: Annotated[
        int, Doc(_BESIDE, "Texts in the request of bulk, each of --random-input-len tokens.", least=1)
    ] = 10000


def check(options: BesideOptions, given: Iterable[str], endpoint: str) -> None:
    """Raises OptionError if options were given that do not go together; `given` are their fields."""
    own = set(BesideOptions.__struct_fields__)
    if not options.beside:
        if needing := sorted(own & set(given)):
            raise OptionError(f"{_flag(needing[0])} needs --beside")
        return
    if "bulk" in options.beside and len(options.beside) > 1:
        raise OptionError("--beside bulk is measured by itself; name no other kind with it")
    if idle := [field for field in _MEANINGLESS if field in given]:
        raise OptionError(f"{_flag(idle[0])} means nothing with --beside; leave it out")
    if endpoint == "embeddings":
        raise OptionError("--beside reads streams: of --endpoint completions or chat")


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
