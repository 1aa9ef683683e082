"""Checks the sampling parameters of HTTP requests and of `LLM`, and resolves their defaults.

`SamplingParams` is what was asked. `resolve` returns `worker.protocol.Sampling`, in which nothing is a
default any more, or refuses in the words of vLLM, which clients know.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Sequence
from copy import deepcopy
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec

from server.errors import BadRequest, invalid, refuse_for_sources, too_many
from server.grammars.response_format import AskedForm, StructuredOutputsParams
from server.model_facts import Facts
from server.requests.prompt_length import check_prompt_length
from server.requests.repetition import RepetitionDetectionParams
from server.requests.unsupported_parameters import UnsupportedSampling
from worker.protocol import Sampling

if TYPE_CHECKING:
    from server.text.tokenizer import Tokenizer

GREEDY_BELOW = 1e-5
COLDEST = 0.01
"""Temperatures between GREEDY_BELOW and this are raised to it: dividing by less loses all precision."""
MAX_REPETITION = 1e20
"""The largest repetition penalty; those beyond it, or below its inverse, would leave no finite logits."""

MAX_ARGUMENTS = 16 << 10
"""Bytes of the arguments for logits processors, which every answer carries."""

INT64 = 1 << 63

_ABOVE_ZERO = math.ulp(0.0)
"""The least number above zero."""
_FINITE = (-sys.float_info.max, sys.float_info.max, "a finite number")
_SIGMAS = "non-negative, or -1 (off)"
_PENALTY = (-2, 2, "in [-2, 2]")
_NUMBERS: dict[str, tuple[float, tuple[tuple[float, float, str], ...]]] = {
    "temperature": (1.0, (_FINITE, (0, math.inf, "non-negative"), (-math.inf, 2, "in [0, 2]"))),
    "n": (1, ((1, math.inf, "at least 1"),)),
    "speculative_tokens": (0, ((0, math.inf, "at least 0"),)),
    "top_p": (1.0, ((_ABOVE_ZERO, 1, "in (0, 1]"),)),
    "top_k": (0, ((-1, math.inf, "0 (disable), or at least 1"),)),
    "min_p": (0.0, ((0, 1, "in [0, 1]"),)),
    "typical_p": (1.0, ((_ABOVE_ZERO, 1, "in (0, 1]"),)),
    "top_n_sigma": (0.0, (_FINITE, (-1, math.inf, _SIGMAS))),
    "presence_penalty": (0.0, (_PENALTY,)),
    "frequency_penalty": (0.0, (_PENALTY,)),
    "repetition_penalty": (
        1.0,
        (
            _FINITE,
            (_ABOVE_ZERO, math.inf, "greater than zero"),
            (1 / MAX_REPETITION, MAX_REPETITION, f"in [{1 / MAX_REPETITION:g}, {MAX_REPETITION:g}]"),
        ),
    ),
}
"""The neutral value of each parameter that is a number, and its ranges with the words for them."""
_NEUTRAL = {name: neutral for name, (neutral, _) in _NUMBERS.items()}
_asked_numbers = attrgetter(*_NUMBERS)
_unsupported = attrgetter(*UnsupportedSampling.__struct_fields__)
_NOTHING = (None,) * len(UnsupportedSampling.__struct_fields__)


class RequestOutputKind(Enum):
    """The form of each output of a request that has several; the names are vLLM's."""

    CUMULATIVE = 0
    """All of the answer so far."""
    DELTA = 1
    """The part of the answer that came since the last output."""
    FINAL_ONLY = 2
    """The whole answer, once."""


class SamplingParams(UnsupportedSampling, kw_only=True, repr_omit_defaults=True):
    """The sampling parameters. None means the default: generation_config.json's, else the neutral one."""

    n: int = 1
    """The number of answers to each prompt."""
    temperature: float | None = None
    """Randomness of the choice; 0 is greedy."""
    top_p: float | None = None
    top_k: int | None = None
    """How many of the most likely tokens to draw from; 0 and -1 draw from all."""
    min_p: float | None = None
    typical_p: float | None = None
    """The mass of the tokens whose surprise is nearest to the mean, of which one is drawn; 1 is all."""
    top_n_sigma: float | None = None
    """How many standard deviations below the likeliest logit others may lie; 0 and -1 are off."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    """The seed of choice i is seed + i. None draws a random seed."""
    max_tokens: int | None = 16
    """The longest answer. None fills the context, or takes max_new_tokens of generation_config.json."""
    min_tokens: int = 0
    stop: str | list[str] | None = []
    stop_token_ids: list[int] | None = []
    repetition_detection: RepetitionDetectionParams | None = None
    """Ends an answer that repeats itself, with the finish reason repetition."""
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    bad_words: list[str] | None = []
    logit_bias: dict[int, float] | None = {}
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    """The form of the answers of `LLM`, `LLMEngine` and `AsyncLLM`. HTTP has fields of its own for it."""
    speculative_tokens: int | None = None
    """The most tokens that are guessed at a time; 0 guesses none. None leaves it to the engine."""
    extra_args: dict[str, Any] | None = None
    """Arguments for the operator's logits processors."""
    logprobs: int | None = None
    """How many of the most likely tokens to report beside the chosen one; -1 is the whole vocabulary."""
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    """Keep so many of the last tokens of the prompt; -1 keeps what leaves room for the answer."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """Accepted and without effect: tokenizers of the `tokenizers` library put no spaces there."""
    shown_as: dict[int, str] | None = None
    """Text to show in place of tokens, hidden ones too. If given, deltas have the width of each token."""
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """The form of the outputs of `AsyncLLM` and `LLMEngine`; `LLM` and HTTP have their own forms."""
    stream_interval: int | None = None
    """Tokens from one output to the next, if more than the option stream_interval says."""

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def asked_form(self) -> AskedForm | None:
        """What is asked of the form of the answers, if anything is. Raises BadRequest."""
        if (params := self.structured_outputs) is None:
            return None
        asked = AskedForm(params, "structured_outputs")
        asked.constraint()
        return asked

    def clone(self) -> SamplingParams:
        return deepcopy(self)

    def resolve_all(
        self, facts: Facts, tokenizer: Tokenizer, prompt_lens: Sequence[int]
    ) -> list[list[Sampling]]:
        """Returns for each prompt what `resolve` returns, but checks only once what is the same for all."""
        first = self.resolve(facts, tokenizer, prompt_lens[0])
        _check_entries(first[0], self.n * len(prompt_lens), facts)
        return [first, *(self._for_length(first[0], facts, length) for length in prompt_lens[1:])]

    def _for_length(self, resolved: Sampling, facts: Facts, prompt_len: int) -> list[Sampling]:
        """The same for a prompt of another length."""
        check_prompt_length(prompt_len, facts)
        max_tokens = self._max_tokens(facts, prompt_len)
        self._check_min_tokens(max_tokens, facts)
        return self._choices(msgspec.structs.replace(resolved, max_tokens=max_tokens, seed=self._seed()))

    def resolve(self, facts: Facts, tokenizer: Tokenizer, prompt_len: int) -> list[Sampling]:
        """Returns one Sampling for each of the n choices; raises BadRequest."""
        if _unsupported(self) != _NOTHING:
            self.check_unsupported(UnsupportedSampling.__struct_fields__)
        check_prompt_length(prompt_len, facts)
        numbers = self._numbers(facts)
        if self.n > facts.limits.n:
            raise invalid("n", f"n must be at most {facts.limits.n}, got {self.n}.", self.n)
        if self.stop not in (None, []):
            self._check_stops(facts, tokenizer)
        if self.repetition_detection is not None:
            self.repetition_detection.check()
        temperature, top_k, sigmas = numbers["temperature"], int(numbers["top_k"]), numbers["top_n_sigma"]
        if -1 < sigmas < 0:
            raise invalid("top_n_sigma", f"top_n_sigma must be {_SIGMAS}, got {sigmas}.", sigmas)
        greedy, max_tokens = temperature < GREEDY_BELOW, self._max_tokens(facts, prompt_len)
        self._check_min_tokens(max_tokens, facts)
        ends = () if self.ignore_eos else facts.eos_token_ids
        if self.stop_token_ids:
            facts.check_token_ids(self.stop_token_ids, "stop_token_ids")
            ends = (*ends, *self.stop_token_ids)
        logprobs, of_prompt = self.logprobs, self.prompt_logprobs
        suppressed: tuple[int, ...] = ()
        if facts.sources is not None:
            refuse_for_sources(prompt_logprobs=of_prompt is not None)
            suppressed = facts.sources.suppressed
        template = Sampling(
            max_tokens=max_tokens,
            temperature=0.0 if greedy else max(temperature, COLDEST),
            top_p=1.0 if greedy else numbers["top_p"],
            top_k=0 if greedy or top_k == -1 or top_k >= facts.vocab_size else top_k,
            min_p=0.0 if greedy else numbers["min_p"],
            typical_p=1.0 if greedy else numbers["typical_p"],
            top_n_sigma=0.0 if greedy or sigmas == -1 else sigmas,
            presence_penalty=numbers["presence_penalty"],
            frequency_penalty=numbers["frequency_penalty"],
            repetition_penalty=numbers["repetition_penalty"],
            seed=self._seed(),
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(dict.fromkeys(ends)),
            logit_bias=self._logit_bias(facts) if self.logit_bias else {},
            bad_words=_bad_words(self.bad_words, facts, tokenizer) if self.bad_words else (),
            allowed_token_ids=() if self.allowed_token_ids is None else self._allowed(facts),
            suppressed=suppressed,
            logprobs=logprobs and check_logprobs("logprobs", "sample", logprobs, facts),
            logprobs_mode=facts.logprobs_mode,
            prompt_logprobs=of_prompt and check_logprobs("prompt_logprobs", "prompt", of_prompt, facts),
            extra_args=_check_arguments(self.extra_args, facts) if self.extra_args else {},
        )
        return [template] if self.n == 1 else self._choices(template)

    def _choices(self, first: Sampling) -> list[Sampling]:
        """Each of the n choices, of which the first is given, with a seed of its own."""
        return [msgspec.structs.replace(first, seed=(first.seed + i) % INT64) for i in range(self.n)]

    def _numbers(self, facts: Facts) -> dict[str, float]:
        """The parameters that are numbers, as asked for or by default, each within its range."""
        found, defaults = dict[str, float](), {**_NEUTRAL, **facts.defaults}
        for (name, (_, ranges)), asked in zip(_NUMBERS.items(), _asked_numbers(self), strict=True):
            value = defaults[name] if asked is None else asked
            for least, most, words in ranges:
                if not least <= value <= most:
                    raise invalid(name, f"{name} must be {words}, got {value}.", value)
            found[name] = value
        return found

    def _seed(self) -> int:
        if self.seed is None or self.seed == -1:
            return secrets.randbits(63)
        if not -INT64 <= self.seed < INT64:
            raise invalid("seed", f"seed must fit in 64 bits, got {self.seed}.", self.seed)
        return self.seed % INT64

    def _max_tokens(self, facts: Facts, prompt_len: int) -> int:
        asked, room = self.max_tokens, min(facts.room_for_answer(prompt_len), facts.limits.new_tokens)
        if asked is None:
            return min(int(facts.defaults.get("max_tokens", room)), room)
        if asked < 1:
            raise invalid("max_tokens", f"max_tokens must be at least 1, got {asked}.", asked)
        if asked > facts.max_model_len and facts.limits.fits_context:
            raise invalid(
                "max_tokens",
                f"max_tokens={asked} cannot be greater than max_model_len={facts.max_model_len}. Please "
                "request fewer output tokens.",
                asked,
            )
        return min(asked, room)

    def _check_min_tokens(self, max_tokens: int, facts: Facts) -> None:
        asked = self.min_tokens
        if self.max_tokens is not None and not facts.limits.fits_context:
            max_tokens = self.max_tokens
        if not 0 <= asked <= max_tokens:
            rule = (
                "greater than or equal to 0"
                if asked < 0
                else f"less than or equal to max_tokens={max_tokens}"
            )
            raise invalid("min_tokens", f"min_tokens must be {rule}, got {asked}.", asked)

    def _check_stops(self, facts: Facts, tokenizer: Tokenizer) -> None:
        limits, stop = facts.limits, self.stop_strings
        if "" in stop:
            raise invalid("stop", "stop cannot contain an empty string.", stop)
        if stop and not self.detokenize:
            raise BadRequest(
                "stop strings are only supported when detokenize is True. Set detokenize=True to use stop.",
                "stop",
            )
        if stop and not tokenizer.writes:
            raise BadRequest(
                "This server has no tokenizer (--skip-tokenizer-init), so its answers have no text with stop "
                "strings. Use stop_token_ids.",
                "stop",
            )
        if len(stop) > limits.stop_strings:
            raise too_many("stop", limits.stop_strings, "strings", len(stop))
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in stop)
        if size > limits.stop_bytes:
            raise BadRequest(
                f"stop strings may hold at most {limits.stop_bytes} bytes together, got {size}.", "stop"
            )

    def _logit_bias(self, facts: Facts) -> dict[int, float]:
        bias, most = self.logit_bias or {}, facts.limits.bias
        if len(bias) > facts.limits.logit_bias:
            raise too_many("logit_bias", facts.limits.logit_bias, "entries", len(bias))
        facts.check_token_ids(list(bias), "logit_bias")
        for value in bias.values():
            if not math.isfinite(value):
                raise invalid("logit_bias", f"logit_bias values must be finite numbers, got {value}.", value)
            if not -most <= value <= most:
                words = f"logit_bias values must be in [-{most}, {most}], got {value}."
                raise invalid("logit_bias", words, value)
        return bias

    def _allowed(self, facts: Facts) -> tuple[int, ...]:
        ids = self.allowed_token_ids
        if not ids:
            raise BadRequest("allowed_token_ids is not None and empty!", "allowed_token_ids")
        if min(ids) < 0 or max(ids) >= facts.vocab_size:
            raise BadRequest("allowed_token_ids contains out-of-vocab token id!", "allowed_token_ids")
        return tuple(dict.fromkeys(ids))


def _check_entries(resolved: Sampling, answers: int, facts: Facts) -> None:
    """Refuses long lists for many answers, each of which is sent to the engine with all of them."""
    entries = len(resolved.stop_token_ids) + len(resolved.logit_bias) + len(resolved.allowed_token_ids)
    entries += sum(map(len, resolved.bad_words))
    most = facts.limits.sampling_entries
    if entries * answers > most:
        raise BadRequest(
            "stop_token_ids, logit_bias, allowed_token_ids and bad_words may hold at most "
            f"{most // answers} entries together in a request for {answers} answers, got {entries}."
        )


def _check_arguments(arguments: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """Refuses arguments for which there is no logits processor, or that are no short JSON."""
    if not facts.ready.worker.processes_logits:
        if isinstance(arguments, dict) and [*arguments] == ["session_id"]:
            return {}  # vLLM's hint for its cache, which is for no processor
        raise BadRequest(
            "vllm_xargs (extra_args in Python) are for logits processors, and this server has none: it was "
            "started without --logits-processors.",
            "vllm_xargs",
        )
    try:
        size = len(msgspec.msgpack.encode(arguments))
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRequest(f"vllm_xargs: {error}", "vllm_xargs") from None
    if size > MAX_ARGUMENTS:
        raise BadRequest(f"vllm_xargs may hold at most {MAX_ARGUMENTS} bytes, got {size}.", "vllm_xargs")
    return arguments


def check_logprobs(name: str, kind: str, asked: int | None, facts: Facts) -> int | None:
    """The number of logprobs to report; -1 is the whole vocabulary. Too many are refused by `name`."""
    if asked is None:
        return None
    if asked < -1:
        raise invalid(name, f"{name} must be non-negative or -1, got {asked}.", asked)
    count = facts.vocab_size if asked == -1 else asked
    if facts.max_logprobs != -1 and count > facts.max_logprobs:
        raise invalid(
            name,
            f"Requested {kind} logprobs of {count}, which is greater than max allowed: {facts.max_logprobs}",
            asked,
        )
    return -1 if count >= facts.vocab_size else count


def _bad_words(words: list[str], facts: Facts, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell a bad word, at the start of a text and after a space."""
    limits = facts.limits
    if len(words) > limits.bad_words:
        raise too_many("bad_words", limits.bad_words, "words", len(words))
    if any(not word.strip() for word in words):
        raise BadRequest("bad_words cannot contain an empty string.", "bad_words")
    # Before tokenizing: no text of more characters than this can pass the check after it.
    _check_bad_word_tokens(-(-sum(map(len, words)) // tokenizer.longest_token), facts)
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for spelling in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(spelling, add_special_tokens=False))
            if not ids:
                raise BadRequest("bad_words entries must tokenize to at least one token.", "bad_words")
            facts.check_token_ids(list(ids), "bad_words")
            sequences[ids] = None
    _check_bad_word_tokens(sum(map(len, sequences)), facts)
    return tuple(sequences)


def _check_bad_word_tokens(count: int, facts: Facts) -> None:
    most = facts.limits.bad_word_tokens
    if count > most:
        raise BadRequest(f"bad_words may hold at most {most} tokens together, got {count}.", "bad_words")
