"""Outputs that show all of the answer so far, its newest part, or its end alone."""

import pytest
from fake_frontend import byte_tokenizer

from engine_core.engine_stats import Timing
from server.errors import Internal
from server.frontend.text_output import Delta
from server.offline.output_builder import OutputBuilder
from server.offline.request_outputs import CompletionOutput, Logprob, RequestOutput
from server.requests.sampling_params import RequestOutputKind, SamplingParams
from worker.protocol import TokenLogprobs

TOKENIZER = byte_tokenizer()
A, B = 97, 98


def answers(kind: RequestOutputKind, **params: object) -> OutputBuilder:
    sampling = SamplingParams(output_kind=kind, **params)  # pyright: ignore[reportArgumentType]
    return OutputBuilder("r", "p", [1, 2], sampling, TOKENIZER)


def after(request: OutputBuilder, *deltas: Delta) -> RequestOutput | None:
    for delta in deltas:
        request.push(delta)
    return request.output()


def say(index: int, text: str, **fields: object) -> Delta:
    return Delta(index, text, list(text.encode()), **fields)  # pyright: ignore[reportArgumentType]


def end(index: int, text: str) -> Delta:
    return say(index, text, finish_reason="length")


def test_cumulative_outputs_hold_all_choices_and_stay_as_they_were() -> None:
    request = answers(RequestOutputKind.CUMULATIVE, n=2)
    first = after(request, say(1, "x"))
    second = after(request, say(0, "a"), end(1, "y"))
    third = after(request, end(0, "b"))
    assert first and second and third
    assert [one.text for one in first.outputs] == ["", "x"]
    assert [(one.text, one.token_ids, one.finish_reason) for one in second.outputs] == [
        ("a", [A], None),
        ("xy", [*b"xy"], "length"),
    ]
    assert [one.text for one in third.outputs] == ["ab", "xy"]
    assert [one.finished for one in (first, second, third)] == [False, False, True]
    assert first.metrics is not None and first.metrics.num_generation_tokens == 1


def test_deltas_hold_what_is_new() -> None:
    request = answers(RequestOutputKind.DELTA, n=2, prompt_logprobs=0)
    entry = TokenLogprobs(ids=[2], values=[-1.0], rank=1)
    first = after(request, say(1, "x", prompt_logprobs=[entry]))
    second = after(request, say(0, "a"), end(1, "y"))
    third = after(request, end(0, "b"))
    assert first and second and third
    assert [[(one.index, one.text) for one in output.outputs] for output in (first, second, third)] == [
        [(1, "x")],
        [(0, "a"), (1, "y")],
        [(0, "b")],
    ]
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 2
    assert second.prompt_logprobs is None and third.finished and not second.finished


def test_the_final_output_alone() -> None:
    request = answers(RequestOutputKind.FINAL_ONLY, n=2)
    assert after(request, say(0, "a"), end(1, "x")) is None
    final = after(request, end(0, "b"))
    assert final is not None and final.finished
    assert [one.text for one in final.outputs] == ["ab", "x"]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_logprobs_and_their_sum(kind: RequestOutputKind) -> None:
    request = answers(kind, logprobs=2)
    likely = TokenLogprobs(ids=[A, A, B], values=[-0.5, -0.5, -1.5], rank=1)
    unlikely = TokenLogprobs(ids=[A, B, 99], values=[-9.0, -0.5, -1.5], rank=7)
    shown = [
        after(request, say(0, "a", logprobs=[likely])),
        after(request, say(0, "a", logprobs=[unlikely], finish_reason="stop", stop_reason=5)),
    ]
    last = shown[-1]
    assert last is not None
    (output,) = last.outputs
    tables = [
        {A: Logprob(-0.5, 1, "a"), B: Logprob(-1.5, 2, "b")},
        {A: Logprob(-9.0, 7, "a"), B: Logprob(-0.5, 1, "b"), 99: Logprob(-1.5, 2, "c")},
    ]
    assert output.logprobs == (tables[1:] if kind == RequestOutputKind.DELTA else tables)
    assert output.cumulative_logprob == -9.5
    assert (output.finish_reason, output.stop_reason, output.finished()) == ("stop", 5, True)


def test_prompt_logprobs_begin_with_none_and_tokens_without_text_have_no_name() -> None:
    request = answers(RequestOutputKind.FINAL_ONLY, prompt_logprobs=0, detokenize=False)
    entry = TokenLogprobs(ids=[2], values=[-1.0], rank=3)
    output = after(request, say(0, "a", prompt_logprobs=[entry], cached_tokens=1), end(0, ""))
    assert output is not None
    assert output.prompt_logprobs == [None, {2: Logprob(-1.0, 3, None)}]
    assert output.num_cached_tokens == 1
    assert output.outputs[0].logprobs is None and output.outputs[0].cumulative_logprob is None


def test_times() -> None:
    request = answers(RequestOutputKind.CUMULATIVE)
    started = after(request, say(0, "a"))
    timing = Timing(queued=0.25, prefill=0.5, decode=1.0, preemptions=2, steps=3, compute=0.75)
    ended = after(request, say(0, "b", finish_reason="stop", timing=timing))
    assert started and ended and started.metrics and ended.metrics
    assert started.metrics.scheduled_ts == 0.0 and started.metrics.first_scheduled_time is None
    metrics = ended.metrics
    assert metrics.scheduled_ts - metrics.queued_ts == pytest.approx(0.25)
    assert metrics.time_in_queue == pytest.approx(0.25)
    assert metrics.first_scheduled_time == pytest.approx(metrics.arrival_time + 0.25)
    assert metrics.first_token_ts == started.metrics.first_token_ts <= metrics.last_token_ts
    assert metrics.num_generation_tokens == 2
    assert (metrics.queued_time, metrics.prefill_time, metrics.decode_time) == (0.25, 0.5, 1.0)
    assert (metrics.compute_time, metrics.steps, metrics.preemptions) == (0.75, 3, 2)


def test_a_failure_ends_the_answers_that_go_on() -> None:
    request = answers(RequestOutputKind.CUMULATIVE, n=2)
    after(request, say(0, "a"), end(1, "x"))
    error = Internal("broken")
    output = request.fail(error)
    assert output.finished and output.error is error and request.finished
    assert [one.finish_reason for one in output.outputs] == ["error", "length"]
    assert output.outputs[0] == CompletionOutput(0, "a", [A], finish_reason="error")


def test_a_failure_also_ends_answers_that_are_shown_in_parts() -> None:
    request = answers(RequestOutputKind.DELTA, n=3)
    after(request, say(0, "a"), end(1, "x"))
    request.push(say(0, "b"))
    output = request.fail(Internal("broken"))
    assert output.finished and request.finished
    assert [(one.index, one.text, one.finish_reason) for one in output.outputs] == [
        (0, "b", None),
        (0, "", "error"),
        (2, "", "error"),
    ]
