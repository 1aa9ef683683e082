"""Parameters that vLLM's classes have and ours do not support yet: refused by name, never ignored."""

from __future__ import annotations

from operator import attrgetter

import msgspec

from server.errors import BadRequest

_NEUTRAL: dict[str, tuple[int, ...]] = {"prompt_logprob_start": (0,), "thinking_token_budget": (-1,)}
"""Numbers that ask for what happens anyway."""


class Unsupported(msgspec.Struct, kw_only=True):
    """Base of structs whose own fields are unsupported: they may only ask for nothing."""

    def check_unsupported(self, names: tuple[str, ...]) -> None:
        values = zip(names, attrgetter(*names)(self), strict=True)
        for name, value in [pair for pair in values if pair[1] is not None]:
            if not _asks_for_nothing(value) and value not in _NEUTRAL.get(name, ()):
                raise BadRequest(f"{type(self).__name__}: {name} is not supported yet. Leave it out.", name)


class UnsupportedSampling(Unsupported, kw_only=True):
    best_of: object = None
    guided_decoding: object = None
    logits_processors: object = None
    logprob_token_ids: object = None
    prompt_logprob_token_ids: object = None
    prompt_logprob_start: object = None
    flat_logprobs: object = None
    skip_reading_prefix_cache: object = None
    thinking_token_budget: object = None


class UnsupportedPooling(Unsupported, kw_only=True):
    step_tag_id: object = None
    returned_token_ids: object = None
    requires_token_ids: object = None
    skip_reading_prefix_cache: object = None
    extra_kwargs: object = None
    late_interaction_params: object = None


def refuse_keywords(call: str, given: dict[str, object], known: tuple[str, ...]) -> None:
    """Raises TypeError for keyword arguments that a call does not have or does not support yet.

    `known` are those of vLLM's call; None and empty values of them ask for nothing and are accepted.
    """
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{call}() has no argument {name!r}")
        if not _asks_for_nothing(value):
            raise TypeError(f"{call}() does not support {name!r} yet; leave it out")


def _asks_for_nothing(value: object) -> bool:
    # Not `in (None, False)`: 0 equals False, and a budget of 0 tokens asks for something.
    return value is None or value is False or value in ([], {})
