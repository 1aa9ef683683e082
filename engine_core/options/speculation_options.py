"""Options of speculation: who makes guesses, and how many at most.

Fields have vLLM's names. What would not be obeyed is refused by name, and numbers of guesses are upper
bounds: how many are made is the engine's choice.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, cast

import msgspec

from engine_core.config import EngineConfig
from models.config import ConfigError

Method = Literal["ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp"]
"""The ways to guess the next tokens: from earlier text, or by a smaller model."""

FROM_TEXT = ("ngram", "suffix")
"""Methods that need no model."""
_BY_MODELS = ("draft_model", "eagle", "eagle3", "mtp")

_MOST = 64
"""The largest number of guesses: more rows of one sequence gain nothing anywhere."""
_USUAL = 16
_USUAL_OF_MODELS = 8
_LONGEST_MATCH = 64

_OF_DRAFTERS = (
    *("model", "revision", "code_revision", "quantization", "max_model_len", "draft_load_config"),
    *("draft_tensor_parallel_size", "kv_cache_dtype"),
)
_CHOSEN = ("model", "revision", "draft_tensor_parallel_size", "max_model_len")
"""The fields of a drafter that may be chosen; others are as they are for the model that it guesses for."""
_READ = (
    *("method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "disable_by_batch_size"),
    *("prompt_lookup_min", "prompt_lookup_max", "suffix_decoding_max_tree_depth"),
    *("suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
    *("suffix_decoding_min_token_prob", "draft_sample_method", "rejection_sample_method"),
)
_WITHOUT_EFFECT = (
    *("attention_backend", "moe_backend", "enforce_eager", "use_local_argmax_reduction"),
    *("disable_padded_drafter_batch", "disable_eagle_block_drop", "index_share_for_mtp_iteration"),
    *("enable_adaptive_verification", "disable_logprobs", "disable_log_stats", "disable_mqa_scorer"),
)
"""Fields that choose among ways to compute of which there is one here, or turn on what is always so."""
_KNOWN = (*_READ, *_OF_DRAFTERS, *_WITHOUT_EFFECT)

_BY_CHANCE = (
    "is not supported; leave it out: a proposed token is accepted only if it is the one that is sampled"
)
_REFUSED = {
    "parallel_drafting": "is not supported; leave it out: tokens are proposed one after the other",
    "use_heterogeneous_vocab": "is not supported: a draft model needs the vocabulary of the target model",
    "speculative_token_tree": "is not supported; leave it out: proposed tokens form a sequence, not a tree",
    "tensor_parallel_size": "is draft_tensor_parallel_size here, as in vLLM",
    "synthetic_acceptance_rates": _BY_CHANCE,
    "synthetic_acceptance_length": _BY_CHANCE,
}
_VERIFIED = "each proposed token is compared with the sampled one, which is `standard`"


class SpeculationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `--speculative-config` that count, all resolved."""

    method: Method
    most: int
    """The most tokens that are guessed for a sequence at a time."""
    least_match: int = 2
    most_match: int = 5
    """The fewest and the most tokens that must have come before as they do now, for `ngram`."""
    suffix_depth: int = 24
    """The most tokens of a match, for `suffix`."""
    suffix_bytes: int = 64 << 20
    """The memory in which `suffix` keeps earlier answers."""
    suffix_answers: int = 10_000
    """The most answers that it keeps."""
    suffix_factor: float = 1.0
    """The most guesses for each token of a match, for `suffix`."""
    suffix_chance: float = 0.1
    """The least chance of a guess, for `suffix`."""
    model: str | None = None
    """The drafter, for methods that have one: a folder or an id of the hub."""
    revision: str | None = None
    drafter_ranks: int | None = None
    """The ranks among which the drafter is divided; None: those of the model that it guesses for."""
    drawn: bool = False
    """Whether the drafter draws its guesses with each request's own random numbers."""
    most_sequences: int | None = None
    """The most sequences that run while tokens are guessed, if the operator bounds them."""
    most_by_sequences: tuple[tuple[int, int, int], ...] = ()
    """Bounds by the number of sequences that run: from so many to so many, so many guesses for each."""

    def most_for(self, sequences: int) -> int:
        """The most tokens that are guessed for each of so many running sequences at a time."""
        if self.most_sequences is not None and sequences > self.most_sequences:
            return 0
        if not self.most_by_sequences:
            return self.most
        bounds = [most for first, last, most in self.most_by_sequences if first <= sequences <= last]
        return min([self.most, *bounds])


def read_guess_options(config: EngineConfig) -> SpeculationOptions | None:
    """The options of an engine that guesses tokens; None if it shall not. Raises ConfigError."""
    if config.speculative_config is None:
        return None
    given = {key: value for key, value in config.speculative_config.items() if value is not None}
    _check_names(given)
    method = _method(given)
    _check_drafter(given, method)
    _check_verification(given)
    usual = {"suffix": 24, "ngram": _USUAL}.get(method, _USUAL_OF_MODELS)
    return SpeculationOptions(
        method=method,
        most=_whole(given, "num_speculative_tokens", usual, 1, _MOST),
        suffix_depth=_whole(given, "suffix_decoding_max_tree_depth", 24, 1, _LONGEST_MATCH),
        suffix_answers=_whole(given, "suffix_decoding_max_cached_requests", 10_000, 0, 10**9),
        suffix_factor=_number(given, "suffix_decoding_max_spec_factor", 1.0, 0.0, 1000.0),
        suffix_chance=_number(given, "suffix_decoding_min_token_prob", 0.1, 0.0, 1.0),
        most_sequences=_whole(given, "disable_by_batch_size", 0, 0, 10**9) or None,
        most_by_sequences=_bounds(given.get("num_speculative_tokens_per_batch_size")),
        drawn=given.get("draft_sample_method") == "probabilistic",
        **_drafter(given, method),
        **_matches(given),
    )


def _refuse(why: str) -> NoReturn:
    raise ConfigError(f"--speculative-config: {why}")


def _check_names(given: Mapping[str, object]) -> None:
    for key, value in given.items():
        if key in _REFUSED and value is not False:
            _refuse(f"{key} {_REFUSED[key]}")
        if key not in _KNOWN and key not in _REFUSED:
            near = difflib.get_close_matches(key, _KNOWN, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_KNOWN)}"
            _refuse(f"there is no {key[:64]}; {hint}")


def _method(given: Mapping[str, object]) -> Method:
    """The method that is named, or else the one that the name of the model says."""
    model = given.get("model")
    named = given.get("method", str(model).strip("[]") if model in ("ngram", "[ngram]") else None)
    if named is None:
        named = "ngram" if model is None else _named_by(str(model))
    if named == "ngram_gpu":
        return "ngram"  # the same guesses, looked up elsewhere
    if str(named).endswith("_mtp"):
        return "mtp"  # as vLLM calls it for each family
    if named not in (*FROM_TEXT, *_BY_MODELS):
        _refuse(f"method {named!r} is not supported; there are {', '.join((*FROM_TEXT, *_BY_MODELS))}")
    return cast("Method", named)


def _named_by(model: str) -> str:
    """The method that the name of a drafter says, as vLLM reads it."""
    name = f"-{model.lower().replace('/', '-')}-"
    return next((each for each in ("eagle3", "eagle") if f"-{each}-" in name), "draft_model")


def _check_drafter(given: Mapping[str, object], method: Method) -> None:
    """Refuse fields of drafters that do not go with the method, and a method without its drafter."""
    for key in _OF_DRAFTERS:
        if method in FROM_TEXT and key in given and given[key] not in (method, f"[{method}]"):
            _refuse(
                f"{key} goes with a method that has a model of its own, and {method} has none; leave it out"
            )
        if method not in FROM_TEXT and key in given and key not in _CHOSEN:
            _refuse(f"{key} of a draft model is that of its target model; leave it out")
    if method not in (*FROM_TEXT, "mtp") and not isinstance(given.get("model"), str):
        _refuse(f"{method} needs a drafter: name it by model, a folder or an id of the hub")


def _drafter(given: Mapping[str, object], method: Method) -> dict[str, Any]:
    if method in FROM_TEXT:
        return {}
    ranks = "draft_tensor_parallel_size"
    return {
        "model": given.get("model"),
        "revision": given.get("revision"),
        "drafter_ranks": _whole(given, ranks, 1, 1, 1 << 16) if ranks in given else None,
    }


def _check_verification(given: Mapping[str, object]) -> None:
    verified = given.get("rejection_sample_method", "standard")
    if verified != "standard":
        _refuse(f"rejection_sample_method {verified!r} is not supported; leave it out: {_VERIFIED}")
    drawn = given.get("draft_sample_method", "greedy")
    if drawn not in ("greedy", "probabilistic"):
        _refuse(f"draft_sample_method is greedy or probabilistic, not {drawn!r}")


def _matches(given: Mapping[str, object]) -> dict[str, Any]:
    """The bounds of n-grams: if one of them is given alone, it is the other one too."""
    names = ("prompt_lookup_min", "prompt_lookup_max")
    found = [_whole(given, name, 0, 1, _LONGEST_MATCH) for name in names]
    if not any(found):
        return {}
    least, most = found[0] or found[1], found[1] or found[0]
    if least > most:
        _refuse(f"prompt_lookup_min={least} must be <= prompt_lookup_max={most}")
    return {"least_match": least, "most_match": most}


def _bounds(given: object) -> tuple[tuple[int, int, int], ...]:
    """The bounds by the number of sequences: a list of [first, last, most], or {"first-last": most}."""
    rows: list[object] = []
    if isinstance(given, dict):
        for key, most in cast("dict[str, object]", given).items():
            first, _, last = key.partition("-")
            rows.append([first, last or first, most])
    try:
        found = msgspec.convert(rows or given or [], tuple[tuple[int, int, int], ...], strict=False)
        if all(1 <= first <= last and 0 <= most <= _MOST for first, last, most in found):
            return found
    except msgspec.ValidationError:
        pass
    _refuse(
        "num_speculative_tokens_per_batch_size is a list of [first, last, tokens], such as [[1, 4, 8], "
        f"[5, 16, 2]], with 0 to {_MOST} tokens for each number of sequences from the first to the last"
    )


def _whole(given: Mapping[str, object], name: str, default: int, least: int, most: int) -> int:
    value = given.get(name, default)
    if name in given and (type(value) is not int or not least <= value <= most):
        _refuse(f"{name} is a whole number from {least} to {most}, not {value!r}")
    return cast("int", value)


def _number(given: Mapping[str, object], name: str, default: float, least: float, most: float) -> float:
    value = given.get(name, default)
    if not isinstance(value, int | float) or not least <= value <= most:
        _refuse(f"{name} is a number from {least:g} to {most:g}, not {value!r}")
    return float(value)
