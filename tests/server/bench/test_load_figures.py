"""Figures from timings made by hand, and the form in which they are kept and shown."""

import io

import msgspec
import pytest

from server.bench.endpoints import Outcome
from server.bench.load_generator import Figures, Load, LoadBar, Result, percentile, spread, summarize, table

# Two answers. The first: 4 tokens in 2 chunks; the second: 3 tokens, a chunk each.
FIRST = Outcome(due=10.0, ended=11.0, input_tokens=8, output_tokens=4, times=[10.1, 10.7])
SECOND = Outcome(due=10.0, ended=10.5, input_tokens=8, output_tokens=3, times=[10.2, 10.3, 10.4])
BROKEN = Outcome(due=10.0, ended=10.1, error="HTTP 503", detail="full")
SHORT = Outcome(due=10.0, ended=12.0, input_tokens=8, output_tokens=1, times=[12.0])


def figures(*outcomes: Outcome, **load: object) -> Figures:
    return summarize(Load(**load), outcomes, 2.0, (50, 90))  # pyright: ignore[reportArgumentType]


def test_percentiles_lie_between_values() -> None:
    assert [percentile([1, 2, 3, 4], p) for p in (0, 50, 90, 100)] == pytest.approx([1, 2.5, 3.7, 4])
    assert percentile([7], 99) == 7


def test_a_spread_is_in_milliseconds() -> None:
    found = spread([0.3, 0.1, 0.2], (90,))
    assert found is not None
    assert (found.mean, found.median, found.least, found.most) == pytest.approx((200, 200, 100, 300))
    assert found.percentiles == {"p90": pytest.approx(280)}
    assert spread([], (50,)) is None


def test_tokens_are_those_of_usage_and_gaps_those_of_chunks() -> None:
    found = figures(FIRST, SECOND)
    assert found.ttft is not None and found.tpot is not None and found.itl is not None
    assert found.ttft.mean == pytest.approx(150)
    assert (found.tpot.least, found.tpot.most) == pytest.approx((100, 200))  # 0.2 s / 2, and 0.6 s / 3
    assert (found.itl.least, found.itl.most) == pytest.approx((100, 600))
    assert found.e2el is not None
    assert found.e2el.most == pytest.approx(1000)


def test_rates_are_over_the_whole_time() -> None:
    found = figures(FIRST, SECOND)
    assert found.requests_per_second == 1
    assert found.output_tokens_per_second == 3.5
    assert found.total_tokens_per_second == 11.5


def test_one_token_has_no_time_per_token() -> None:
    assert figures(SHORT).tpot is None
    assert SHORT.tpot is None
    assert SHORT.gaps == []


def test_what_failed_counts_as_failed_only() -> None:
    other = Outcome(due=10.0, ended=10.1, error="timeout")
    found = figures(FIRST, BROKEN, BROKEN, other, SECOND)
    assert (found.completed, found.failed) == (2, 3)
    assert [(f.kind, f.count, f.example) for f in found.failures] == [
        ("HTTP 503", 2, "full"),
        ("timeout", 1, ""),
    ]
    good = figures(FIRST, SECOND)
    assert (found.ttft, found.output_tokens_per_second) == (good.ttft, good.output_tokens_per_second)


def test_nothing_but_failures_has_no_latencies() -> None:
    found = figures(BROKEN)
    assert (found.ttft, found.tpot, found.itl, found.e2el) == (None, None, None, None)
    assert found.requests_per_second == 0


def test_a_load_has_a_name() -> None:
    names = [figures(concurrency=8).name, figures(rate=2.5).name, figures().name]
    assert names == ["8 at once", "2.5/s", "all at once"]


def result(*points: Figures) -> Result:
    return Result(
        date="2026-01-01", endpoint="completions", model="m", dataset={"name": "random"}, points=[*points]
    )


def test_the_result_survives_json() -> None:
    kept = result(figures(FIRST, SECOND, BROKEN, concurrency=4), figures(SHORT, rate=1.5), figures(BROKEN))
    data = msgspec.json.encode(kept)
    assert msgspec.json.decode(data, type=Result) == kept
    plain = msgspec.json.decode(data)
    assert plain["format"] == 1
    assert plain["points"][0]["concurrency"] == 4
    assert plain["points"][0]["request_rate"] is None
    assert plain["points"][1]["request_rate"] == 1.5
    assert set(plain["points"][0]["ttft"]) == {"mean", "median", "least", "most", "percentiles"}


def test_the_table_has_a_column_for_each_load() -> None:
    lines = table([figures(FIRST, SECOND, concurrency=1), figures(BROKEN, concurrency=8)], ("ttft",)).split(
        "\n"
    )
    assert lines[0].split("at once") == [lines[0].split("1 at")[0] + "1 ", "   8 ", ""]
    by_title = {line[:30].strip(): line[30:].split() for line in lines}
    assert by_title["requests failed"] == ["0", "1"]
    assert by_title["median"] == ["150.00"]
    assert not any("TPOT" in line for line in lines)
    assert lines[-1] == "8 at once: 1 x HTTP 503: full"


def test_the_table_of_embeddings_speaks_of_inputs() -> None:
    shown = table([figures(Outcome(due=0, ended=1, inputs=4, input_tokens=40))], ("ttft", "e2el"))
    assert "inputs/s" in shown
    assert "output tokens" not in shown
    assert "TTFT" not in shown


def test_the_bar_shows_how_far_it_is() -> None:
    bar = LoadBar("8 at once", 4, None, io.StringIO())
    bar.add(FIRST)
    bar.add(BROKEN)
    assert bar.line(2.0) == f"8 at once  {'█' * 12}{'░' * 12} 2/4 requests, 1 failed, 2 tokens/s"


def test_nobody_is_shown_a_bar_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    bar = LoadBar("x", 1, None, out)
    bar.add(FIRST)
    bar.close()
    assert out.getvalue() == ""
