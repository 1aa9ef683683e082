"""Makes the pieces of text that a client sees from the tokens of the engine, for one choice of a request.

The engine ends a sequence by tokens and length. Text exists in the server only, and so do stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine_core.client.in_flight import AddOptions
from engine_core.engine_stats import GuessReport, Timing
from engine_core.protocol import Tokens
from server.access.admission import Admission
from server.metrics.server_metrics import Metrics
from server.model_facts import SourceFacts
from server.requests.repetition import LoopFinder
from server.requests.sampling_params import SamplingParams
from server.text.detokenizer import MarkedText
from server.text.stop_strings import StopStrings
from server.text.tokenizer import TokenIds, Tokenizer, count_ids, unpack
from worker.protocol import Sampling, TokenLogprobs

ALL_TOKENS = 1 << 30
"""The interval of an answer that is shown once, as a whole: more tokens than any answer has."""


class Delta(msgspec.Struct, gc=False):
    """The new part of one choice. The delta with a finish reason is the choice's last."""

    index: int
    text: str = ""
    """Whole characters only; empty while a character or a possible stop string is incomplete."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    """Logprobs of each of token_ids, if asked for."""
    widths: list[int] = []
    """The characters that each token has added to the text, if `shown_as` is given. Text that is
    held back, because it may become a stop string, is counted too."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the text; None for an end-of-sequence token."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Set in the first delta, if asked for: logprobs of each prompt token but the first."""
    cached_tokens: int = 0
    """Set in the first delta: how many prompt tokens were found in the prefix cache."""
    timing: Timing | None = None
    """Set in the last delta."""
    guesses: GuessReport | None = None
    """Set in the last delta, if asked for: what became of guesses."""
    expected: float | None = None
    """Set in the first delta: the seconds in which the engine expected the first token, if it said so."""

    @property
    def is_notice(self) -> bool:
        """Whether the delta brings nothing but the news that the request waits for so long as expected."""
        return self.expected is not None and not self.token_ids and self.finish_reason is None


@dataclass(slots=True)
class CheckedPrompt:
    """A prompt to generate for: one choice for each of `params`."""

    prompt: TokenIds
    sampling: SamplingParams
    params: list[Sampling]
    interval: int
    replica: int | None
    options: AddOptions
    admission: Admission

    def read_by_encoder(self, known: SourceFacts) -> None:
        """Make the prompt a source, and go on from the tokens with which answers begin."""
        self.options["source"] = known.source(unpack(self.prompt))
        self.prompt = list(known.start)

    @property
    def length(self) -> int:
        """The tokens that the client has sent."""
        source = self.options.get("source")
        return count_ids(self.prompt) if source is None else source.length


class TextOutput:
    """Collects one choice's tokens into deltas of `interval` tokens; the first and the last come at once."""

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
        interval: int,
    ) -> None:
        self.count = 0
        """Number of tokens of this choice so far, the hidden stop token included."""
        self._delta = Delta(index)
        self._interval = interval
        self._due = 1
        self._include_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._eos = eos_token_ids[:1]
        """The token that ends answers, which is no reason to stop that is told, as in vLLM."""
        self._ends = frozenset(eos_token_ids).union(sampling.stop_token_ids or ())
        self._text = (
            tokenizer.text_state(prompt, sampling.skip_special_tokens, sampling.shown_as)
            if sampling.detokenize
            else None
        )
        stop = sampling.stop_strings
        self._stops = StopStrings(stop, include=self._include_stop) if stop else None
        loops = sampling.repetition_detection
        self._loops = LoopFinder(loops) if loops is not None and loops.max_pattern_size else None

    def push(self, new: Tokens) -> Delta | None:
        """Returns the next delta, if there are enough tokens for one. There is none after a finish reason."""
        delta = self._delta
        if new.expected is not None:
            if not new.tokens and new.finish is None:
                return Delta(delta.index, expected=new.expected)
            delta.expected = new.expected
        if new.prompt_logprobs is not None:
            delta.prompt_logprobs = new.prompt_logprobs
        delta.cached_tokens += new.cached
        if self._stops is None and self._loops is None:
            self._push_all(new)
        else:
            self._push_until_stop(new)
        if delta.finish_reason is None and (not delta.token_ids or self.count < self._due):
            return None
        if isinstance(self._text, MarkedText):
            delta.widths, self._text.widths = self._text.widths, []
        self._due = self.count + self._interval
        self._delta = Delta(delta.index)
        return delta

    def _push_all(self, new: Tokens) -> None:
        self._take(new.tokens, new.logprobs)
        if self._text is not None:
            self._delta.text += self._text.push(self._shown(new))
            if new.finish is not None:
                self._delta.text += self._text.flush()
        if new.finish is not None:
            self._finish(new)

    def _push_until_stop(self, new: Tokens) -> None:
        """Reads token by token, so that the one that ends the answer is the last counted."""
        shown, stop = self._shown(new), None
        for i, id in enumerate(shown):
            if self._text is not None:
                text = self._text.push((id,))
                if self._stops is not None:
                    text, stop = self._stops.push(text, looking=self.count + i >= self._min_tokens)
                self._delta.text += text
            reason = "stop"
            if stop is None and self._loops is not None and self._loops.push(id):
                is_last = new.finish is not None and i + 1 == len(new.tokens)
                if not is_last and self.count + i + 1 >= self._min_tokens:
                    reason, stop = "repetition", "repetition_detected"
                    self._delta.text += self._rest()[0]
            if stop is not None:
                self._take(new.tokens[: i + 1], new.logprobs[: i + 1])
                self._delta.finish_reason, self._delta.stop_reason = reason, stop
                self._delta.timing, self._delta.guesses = new.timing, new.guesses
                return
        self._take(new.tokens, new.logprobs)
        if new.finish is not None:
            rest, stop = self._rest()
            self._delta.text += rest
            self._finish(new)
            if stop is not None and new.finish in ("stop", "length"):
                self._delta.finish_reason, self._delta.stop_reason = "stop", stop

    def _rest(self) -> tuple[str, str | None]:
        """The text that was held back, now that nothing more comes, and the stop string that ended it."""
        if self._text is None:
            return "", None
        text = self._text.flush()
        if self._stops is None:
            return text, None
        text, stop = self._stops.push(text)
        return (text, stop) if stop else (text + self._stops.flush(), None)

    def _shown(self, new: Tokens) -> list[int]:
        """The tokens whose text the client sees: all but the stop token."""
        if new.finish != "stop" or self._include_stop or not new.tokens or new.tokens[-1] not in self._ends:
            return new.tokens  # a grammar that is complete ends an answer behind a token of its text
        return new.tokens[:-1]

    def _take(self, tokens: list[int], logprobs: list[TokenLogprobs]) -> None:
        self._delta.token_ids += tokens
        self._delta.logprobs += logprobs
        self.count += len(tokens)

    def _finish(self, new: Tokens) -> None:
        self._delta.finish_reason, self._delta.timing = new.finish, new.timing
        self._delta.guesses = new.guesses
        if new.finish == "stop" and new.tokens and new.tokens[-1] in self._ends.difference(self._eos):
            self._delta.stop_reason = new.tokens[-1]


class Choice:
    """One of the n answers to a request while it is generated: its text, its times, and its work."""

    __slots__ = ("_account", "_admission", "_is_counted", "_record", "_text", "_work", "finished")

    def __init__(
        self,
        asked: CheckedPrompt,
        index: int,
        metrics: Metrics,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
    ) -> None:
        params, sampling, admission = asked.params[index], asked.sampling, asked.admission
        prompt, length = unpack(asked.prompt), asked.length
        may_stop = bool(params.stop_token_ids) or bool(sampling.stop)
        self.finished = self._is_counted = False
        self._text = TextOutput(index, prompt, sampling, tokenizer, eos_token_ids, asked.interval)
        self._work = admission.begin_work(length, params.max_tokens, may_stop=may_stop)
        self._record = metrics.begin(length, len(asked.params), params.max_tokens)
        self._admission, self._account = admission, admission.caller.account

    def fail(self) -> None:
        """Note that the engine ended it with an error. Raises the error that ended it here, if one did."""
        self._record.finish("error", None)
        self.finished = True
        self._admission.check()

    def push(self, new: Tokens) -> Delta | None:
        if new.finish == "abort":
            self._admission.check()
        before = self._text.count
        delta = self._text.push(new)
        count = self._text.count - before
        if not self._is_counted:  # as `count` does it, without a call for each token
            if count and not self._work.begun:
                self._work.begin()
            self._record.tokens(count, new.cached)
            if count and self._account is not None:
                self._account.wrote(count)
        if delta is not None and delta.finish_reason is not None:
            self.finished = True
            self._record.finish(delta.finish_reason, new.timing)
        return delta

    def count(self, tokens: int, cached: int) -> None:
        """Count tokens that are computed for the answer before it is known which it has; `push` counts none
        then. `cached`: tokens of its prompt that were cached."""
        self._is_counted = True
        if not self._work.begun:
            self._work.begin()
        self._record.tokens(tokens, cached)
        if self._account is not None:
            self._account.wrote(tokens)

    def close(self) -> None:
        self._work.end()
        if not self.finished:
            self._record.finish("abort", None)
