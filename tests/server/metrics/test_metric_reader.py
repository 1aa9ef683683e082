"""The metrics that programs read are those of the page, as objects."""

from server.metrics.metric_reader import Counter, Gauge, Histogram, Vector, read_metrics

PAGE = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 2.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0"} 7.0
# TYPE facet:engine_busy_seconds_total counter
facet:engine_busy_seconds_total{engine="0"} 1.5
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 4.0
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 2.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf"} 3.0
vllm:iteration_tokens_total_count{engine="0"} 3.0
vllm:iteration_tokens_total_sum{engine="0"} 9.5
"""


def test_every_kind() -> None:
    zero, places = {"engine": "0"}, "vllm:spec_decode_num_accepted_tokens_per_pos"
    assert read_metrics(PAGE) == [
        Gauge("vllm:num_requests_running", zero, 2),
        Counter("vllm:prompt_tokens", zero, 7),
        Counter("facet:engine_busy_seconds", zero, 1.5),
        Vector(places, zero, [5, 3]),
        Vector(places, {"engine": "1"}, [4]),
        Histogram("vllm:iteration_tokens_total", zero, 3, 9.5, {"1.0": 2, "+Inf": 3}),
    ]
