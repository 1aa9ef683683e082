"""The plain counters write the same page as prometheus_client's."""

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from server.metrics.server_metrics import PlainCounters, PlainHistograms

BOUNDS = (0.5, 1, 10)
disable_created_metrics()


def page(counters: type[Counter | PlainCounters], histograms: type[Histogram | PlainHistograms]) -> str:
    registry = CollectorRegistry()
    counted = counters("requests", "How many.", ["route", "status"], registry=registry)
    timed = histograms("seconds", "How long.", ["route"], buckets=BOUNDS, registry=registry)
    counters("never", "Not yet.", ["route"], registry=registry)
    counted.labels("/a", "2xx").inc()
    counted.labels("/a", "2xx").inc(2)
    counted.labels('/"b"', "4xx").inc()
    for seconds in (0.1, 0.5, 0.7, 1, 9.5, 10, 11, 1e9):
        timed.labels("/a").observe(seconds)
    timed.labels("/b").observe(2)
    return generate_latest(registry).decode()


def test_the_page_is_the_same() -> None:
    ours = page(PlainCounters, PlainHistograms)
    assert ours == page(Counter, Histogram)
    assert 'requests_total{route="/a",status="2xx"} 3.0' in ours
    assert 'seconds_bucket{le="1.0",route="/a"} 4.0' in ours
