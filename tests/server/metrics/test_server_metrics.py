"""The metrics page: vLLM's names, and values that are true."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from shown_metrics import labels_by_name

from engine_core.client.replica import Replica, all_stats
from engine_core.engine_stats import (
    LOAD_SECONDS,
    STEP_ROWS,
    STEP_SECONDS,
    STEP_TOKENS,
    AdapterStats,
    Buckets,
    GuessTotals,
    Stats,
    StepBuckets,
    Timing,
)
from server.metrics.server_metrics import Metrics
from worker import logs

LABELS = '{engine="0",model_name="m"}'


def values(metrics: Metrics) -> dict[str, float]:
    lines = metrics.page().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_a_request_is_timed_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("server.metrics.server_metrics.time.monotonic", lambda: now)
    metrics = Metrics("m")
    record = metrics.begin(prompt_tokens=7, n=1, max_tokens=50)
    now = 101.0
    record.tokens(1, cached=4)
    now = 103.0
    record.tokens(4, cached=0)
    record.tokens(0, cached=0)
    now = 103.5
    record.finish("length", Timing(0.2, 0.8, 2.0, preemptions=1, steps=3, compute=0.125))
    found = values(metrics)
    for name, value in {
        "prompt_tokens_total": 7,
        "generation_tokens_total": 5,
        "prompt_tokens_cached_total": 4,
        "time_to_first_token_seconds_sum": 1,
        "inter_token_latency_seconds_sum": 0.5,
        "request_time_per_output_token_seconds_sum": 0.5,
        "e2e_request_latency_seconds_sum": 3.5,
        "request_queue_time_seconds_sum": 0.2,
        "request_inference_time_seconds_sum": 2.8,
        "request_generation_tokens_sum": 5,
        "request_num_preemptions_sum": 1,
        "request_params_max_tokens_sum": 50,
        "request_params_n_count": 1,
    }.items():
        assert found[f"vllm:{name}{LABELS}"] == pytest.approx(value), name
    assert found[f"facet:request_compute_seconds_sum{LABELS}"] == 0.125
    assert found['vllm:request_success_total{engine="0",finished_reason="length",model_name="m"}'] == 1
    assert metrics.tokens_so_far == (7, 5)
    for source, tokens in {"local_compute": 3, "local_cache_hit": 4}.items():
        labels = f'{{engine="0",model_name="m",source="{source}"}}'
        assert found[f"vllm:prompt_tokens_by_source_total{labels}"] == tokens


def test_the_engines_numbers_appear_when_it_has_told_them() -> None:
    first, second = replicas = [Replica(0), Replica(1)]
    metrics = Metrics("m")
    metrics.watch(lambda: replicas)
    assert not any("num_requests_running" in name for name in values(metrics))
    first.stats = Stats(
        running=2,
        waiting=3,
        kv_usage=0.25,
        prefix_queries=10,
        prefix_hits=4,
        preemptions=1,
        steps=9,
        step_tokens=99,
        busy=12.5,
        expected_wait=0.75,
        kernel_compilations=14,
    )
    found = values(metrics)
    for name, value in {
        "num_requests_running": 2,
        "num_requests_waiting": 3,
        "kv_cache_usage_perc": 0.25,
        "prefix_cache_queries_total": 10,
        "prefix_cache_hits_total": 4,
        "num_preemptions_total": 1,
    }.items():
        assert found[f"vllm:{name}{LABELS}"] == value
    assert found[f"facet:engine_busy_seconds_total{LABELS}"] == 12.5
    assert found[f"facet:expected_wait_seconds{LABELS}"] == 0.75
    assert found[f"facet:kernel_compilations_total{LABELS}"] == 14
    assert 'vllm:num_requests_running{engine="1",model_name="m"}' not in found
    second.stats = msgspec.structs.replace(first.stats, running=5)
    assert values(metrics)['vllm:num_requests_running{engine="1",model_name="m"}'] == 5
    first.lose("it broke")
    assert f"vllm:num_requests_running{LABELS}" not in values(metrics)
    assert values(metrics)['facet:replicas_alive{model_name="m"}'] == 0, "none is ready"


def test_the_makeup_of_steps_and_why_requests_wait_are_shown() -> None:
    none = Buckets((0,) * (len(STEP_ROWS) + 1), 0.0)
    seconds = Buckets((0, 2, 1) + (0,) * (len(STEP_SECONDS) - 2), 0.011)
    tokens = Buckets((1, 2) + (0,) * (len(STEP_TOKENS) - 1), 12.0)
    landed = StepBuckets(seconds=seconds, tokens=tokens, decoding=none, prompts=none, texts=none)
    replica = Replica(0)
    replica.stats = Stats(2, 3, 0.0, 0, 0, 0, 3, 12, waiting_tokens=70, deferred=1, landed=landed)
    metrics = Metrics("m")
    metrics.watch(lambda: [replica])
    found = values(metrics)
    assert found[f"facet:waiting_tokens{LABELS}"] == 70
    for reason, count in {"capacity": 2, "deferred": 1}.items():
        labels = f'{{engine="0",model_name="m",reason="{reason}"}}'
        assert found[f"vllm:num_requests_waiting_by_reason{labels}"] == count
    assert found[f"facet:step_seconds_count{LABELS}"] == 3
    assert found['facet:step_seconds_bucket{engine="0",le="0.002",model_name="m"}'] == 2
    assert found[f"vllm:iteration_tokens_total_sum{LABELS}"] == 12
    assert found[f"facet:step_pooled_rows_count{LABELS}"] == 0


def test_guesses_are_counted_by_engine_and_place() -> None:
    first, second = replicas = [Replica(0), Replica(1)]
    metrics = Metrics("m")
    metrics.watch(lambda: replicas)
    first.stats = Stats(1, 0, 0.0, 0, 0, 0, 3, 12)
    assert not any("spec_decode" in name for name in values(metrics)), "nothing is guessed"
    first.stats = msgspec.structs.replace(first.stats, guesses=GuessTotals(5, 12, [4, 2, 0]))
    second.stats = msgspec.structs.replace(first.stats, guesses=GuessTotals(1, 2, [1]))
    found = values(metrics)
    for name, value in {"drafts": 5, "draft_tokens": 12, "accepted_tokens": 6}.items():
        assert found[f"vllm:spec_decode_num_{name}_total{LABELS}"] == value
    for place, value in enumerate((4, 2, 0)):
        labels = f'{{engine="0",model_name="m",position="{place}"}}'
        assert found[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{labels}"] == value
    assert found['vllm:spec_decode_num_drafts_total{engine="1",model_name="m"}'] == 1
    total = all_stats(replicas)
    assert total is not None and total.guesses == GuessTotals(6, 14, [5, 2, 0])


def test_http_requests_are_counted_by_route_and_kind_of_status() -> None:
    metrics = Metrics("m")
    metrics.http("/v1/completions", "POST", 200, 0.2)
    metrics.http("/v1/completions", "POST", 404, 0.1)
    found = values(metrics)
    assert found['http_requests_total{handler="/v1/completions",method="POST",status="2xx"}'] == 1
    assert found['http_requests_total{handler="/v1/completions",method="POST",status="4xx"}'] == 1
    assert found['http_request_duration_seconds_count{handler="/v1/completions",method="POST"}'] == 2


def test_lines_that_the_log_lost_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics("m")
    assert values(metrics)['facet:log_lines_dropped_total{model_name="m"}'] == 0
    monkeypatch.setattr(logs, "dropped", lambda: 7)
    for _ in range(2):
        metrics.count_dropped_lines()
        assert values(metrics)['facet:log_lines_dropped_total{model_name="m"}'] == 7


def test_several_processes_are_shown_as_one(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from server.options.parse_server_options import share_metrics\n"
        "folder = Path(sys.argv[1]); share_metrics(folder)\n"
        "from server.metrics.server_metrics import Metrics\n"
        "metrics = Metrics('m', folder); metrics.count_tokens(5, 0); metrics.rejected()\n"
        "print(metrics.page().decode())"
    )
    for expected in (5.0, 10.0):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert f"vllm:prompt_tokens_total{LABELS} {expected}" in done.stdout


def test_the_page_on_metrics_lists_what_there_is_and_nothing_else() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    listed = re.findall(r"^\| `([a-z0-9_:]+)` \|", page, flags=re.MULTILINE)
    assert sorted(listed) == sorted(labels_by_name())


def test_adapters_are_named_and_counted_by_their_names() -> None:
    replicas = [Replica(0), Replica(1)]
    counts = (0, 2) + (0,) * (len(LOAD_SECONDS) - 1)
    for replica, running in zip(replicas, (["b"], ["a", "b"]), strict=True):
        adapters = AdapterStats(running, ["late"], 2, Buckets(counts, 0.004))
        replica.stats = Stats(1, 0, 0.0, 0, 0, 0, 3, 12, adapters=adapters)
    metrics = Metrics("m")
    metrics.watch(lambda: replicas, 8)
    own = metrics.of_adapter("a")
    own.begin(7, 1, 50)
    own.count_tokens(0, 5)
    own.finished("stop")
    found = values(metrics)
    labels = '{max_lora="8",model_name="m",running_lora_adapters="a,b",waiting_lora_adapters="late"}'
    assert found[f"vllm:lora_requests_info{labels}"] > 1e9
    assert found[f"facet:lora_load_seconds_count{LABELS}"] == found[f"facet:lora_resident{LABELS}"] == 2
    for name, value in {"requests": 1, "prompt_tokens": 7, "generation_tokens": 5}.items():
        assert found[f'facet:lora_{name}_total{{adapter="a",model_name="m"}}'] == value
    assert metrics.tokens_so_far == (7, 5)
    total = all_stats(replicas)
    assert total is not None and total.adapters is not None
    assert total.adapters.loads.counts[1] == 4
