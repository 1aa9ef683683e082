"""Tokens that come several at a time say what they say one by one, wherever a message ends."""

from collections.abc import Sequence
from typing import Any

import pytest
from answers import TOOLS
from fake_frontend import EOS, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from untimed import untimed

from engine_core.engine_stats import GuessReport, Timing
from engine_core.protocol import Finish, Tokens
from server.frontend.text_output import Delta, TextOutput
from server.offline.output_builder import OutputBuilder
from server.output_parsing.answer_reader import AnswerReader
from server.output_parsing.tool_call_dialects import DIALECTS_BY_NAME, THINKING
from server.requests.repetition import RepetitionDetectionParams
from server.requests.sampling_params import RequestOutputKind, SamplingParams
from worker.protocol import TokenLogprobs

TOKENIZER = byte_tokenizer()
CUTS = st.lists(st.integers(1, 6), min_size=60, max_size=60)
LOOPS = RepetitionDetectionParams(max_pattern_size=3, min_count=2)
TEXTS = st.text("ab .é🙂", max_size=24)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"stop": ["ab", "b a"]},
    {"stop": ["é"], "include_stop_str_in_output": True},
    {"stop": ["a"], "min_tokens": 5},
    {"stop_token_ids": [ord(".")]},
    {"stop_token_ids": [ord(".")], "include_stop_str_in_output": True, "stop": ["🙂"]},
    {"skip_special_tokens": False},
    {"detokenize": False},
    {"repetition_detection": LOOPS},
    {"repetition_detection": LOOPS, "min_tokens": 6, "detokenize": False},
    {"repetition_detection": LOOPS, "stop": ["ab", "🙂"]},
]


def messages(ids: Sequence[int], finish: Finish, cuts: Sequence[int]) -> list[Tokens]:
    """The messages of an engine that gives so many tokens in each step."""
    entries = [TokenLogprobs([id], [-float(at)], 1) for at, id in enumerate(ids)]
    made: list[Tokens] = []
    at = 0
    for count in cuts:
        end = min(at + count, len(ids))
        last = end == len(ids)
        made.append(
            Tokens(
                1,
                list(ids[at:end]),
                entries[at:end],
                cached=0 if at else 2,
                finish=finish if last else None,
                timing=Timing(0, 0, 0, 0),
                guesses=GuessReport([1], [1]) if last else None,
            )
        )
        if last:
            return made
        at = end
    raise ValueError("too few cuts")


def read(made: Sequence[Tokens], sampling: SamplingParams, interval: int) -> list[Delta]:
    output = TextOutput(0, [65], sampling, TOKENIZER, (EOS,), interval)
    deltas: list[Delta] = []
    for new in made:
        if (delta := output.push(new)) is not None:
            deltas.append(delta)
            if delta.finish_reason is not None:
                break
    assert output.count == sum(len(delta.token_ids) for delta in deltas)
    return deltas


def whole(deltas: Sequence[Delta]) -> tuple[object, ...]:
    last = deltas[-1]
    return (
        "".join(delta.text for delta in deltas),
        [id for delta in deltas for id in delta.token_ids],
        [entry for delta in deltas for entry in delta.logprobs],
        [width for delta in deltas for width in delta.widths],
        sum(delta.cached_tokens for delta in deltas),
        *(last.finish_reason, last.stop_reason, last.timing),
    )


@pytest.mark.turns(3)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("interval", [1, 4])
@untimed(40)
@given(text=TEXTS, cuts=CUTS, ends=st.booleans())
def test_any_split_gives_the_same_answer(
    options: dict[str, Any], interval: int, text: str, cuts: list[int], ends: bool
) -> None:
    sampling, ids = SamplingParams(**options), list(text.encode())
    if "stop_token_ids" in options and ord(".") in ids:
        ids = ids[: ids.index(ord(".")) + 1]
    elif ends:
        ids.append(EOS)
    finish: Finish = "stop" if ids and ids[-1] in (EOS, ord(".")) else "length"
    single = read(messages(ids or [97], finish, [1] * 60 + [60]), sampling, interval)
    several = read(messages(ids or [97], finish, [*cuts, 60]), sampling, interval)
    assert whole(several) == whole(single)
    for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE):
        assert built(several, sampling, kind) == built(single, sampling, kind)


def built(deltas: Sequence[Delta], sampling: SamplingParams, kind: RequestOutputKind) -> object:
    """What programs get of these deltas at the end."""
    builder = OutputBuilder("r", None, [65], sampling, TOKENIZER, kind)
    for delta in deltas:
        builder.push(delta)
    output = builder.output()
    assert output is not None and output.finished
    return output.outputs


@untimed(40)
@given(cuts=CUTS)
def test_reasoning_and_calls_are_read_alike(cuts: list[int]) -> None:
    text = '<think>a<b</think>so <tool_call>{"name": "stop", "arguments": {}}</tool_call> end'
    sampling = SamplingParams(shown_as={})

    def parts(sizes: Sequence[int]) -> tuple[object, ...]:
        deltas = read(messages([*text.encode(), EOS], "stop", [*sizes, 200]), sampling, 1)
        reader = AnswerReader(DIALECTS_BY_NAME["hermes"], THINKING[0], tools=TOOLS)
        found = [part for delta in deltas for part in reader.push(delta.text, delta.widths)] + reader.finish()
        kinds: dict[str, str] = {}
        for part in found:
            kinds[type(part).__name__] = kinds.get(type(part).__name__, "") + str(getattr(part, "text", ""))
        return kinds, reader.reasoning_tokens

    assert parts(cuts) == parts([1] * len(text))


def test_a_stop_string_in_the_middle_of_a_message_keeps_what_came_before() -> None:
    sampling = SamplingParams(stop=["b"])
    [delta] = read([Tokens(1, [*b"aabaa"], guesses=GuessReport([4], [4]))], sampling, 1)
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("aa", [*b"aab"], "stop")
    assert delta.guesses == GuessReport([4], [4])
