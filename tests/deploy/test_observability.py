"""The stack of compose.yaml: its files fit each other, and ask for metrics that a server has."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_tools import DEPLOY, run
from shown_metrics import labels_by_sample

from server.options.parse_server_options import OPTIONS

FOLDER = DEPLOY / "observability"
DASHBOARD = json.loads((FOLDER / "dashboards" / "facet.json").read_text())
RULES = yaml.safe_load((FOLDER / "alerts.yml").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
FROM_PROMETHEUS = {"up": {"job", "instance"}}


def queries() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    alerts = [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]
    return panels + alerts + [one["query"] for one in DASHBOARD["templating"]["list"]]


def asked(query: str) -> list[tuple[str, set[str]]]:
    """The metrics of a query, each with the labels by which it is chosen."""
    found = re.findall(r"\b((?:vllm|facet):\w+|http_\w+|up)\b(?:\{([^}]*)\})?", query)
    return [(name, set(re.findall(r"(\w+)\s*[=!]", chosen))) for name, chosen in found]


@pytest.mark.parametrize("query", queries())
def test_each_query_asks_for_a_metric_and_labels_that_there_are(query: str) -> None:
    known = {**labels_by_sample(), **FROM_PROMETHEUS}
    metrics = asked(query)
    assert metrics, "no metric of ours"
    grouped = {label.strip() for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(",")}
    for name, labels in metrics:
        assert name in known
        assert labels | grouped <= known[name] | {"job", "instance"}


def test_a_query_for_what_is_not_there_is_found() -> None:
    assert asked('rate(vllm:no_such_total{engine="0"}[1m])') == [("vllm:no_such_total", {"engine"})]
    assert "vllm:no_such_total" not in labels_by_sample()


def test_every_panel_has_a_place_a_unit_and_words() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    for panel in DASHBOARD["panels"]:
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]


def test_prometheus_reads_the_configuration_the_alerts_and_every_panel(tmp_path: Path) -> None:
    run("promtool", "check", "config", FOLDER / "prometheus.yml")
    expressions = [query for query in queries() if not query.startswith("label_values")]
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, expression in enumerate(expressions)
    ]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    run("promtool", "check", "rules", path)


@pytest.mark.parametrize("profile", [[], ["--profile", "gpu"]], ids=["cpu", "gpu"])
def test_docker_compose_reads_the_file(profile: list[str]) -> None:
    run("docker-compose", "-f", DEPLOY / "compose.yaml", *profile, "config", "-q")


def test_the_server_on_cards_differs_by_image_and_devices_alone() -> None:
    plain, gpu = COMPOSE["services"]["facet"], COMPOSE["services"]["facet-gpu"]
    assert {key for key in plain.keys() | gpu.keys() if plain.get(key) != gpu.get(key)} == {
        *("profiles", "build", "image", "shm_size", "deploy", "networks")
    }
    assert "profiles" not in plain and gpu["profiles"] == ["gpu"]
    assert (gpu["build"]["dockerfile"], gpu["image"]) == ("deploy/Dockerfile.cuda", "facet:cuda")
    [device] = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert gpu["networks"]["default"]["aliases"] == ["facet"], "Prometheus asks this name"


def test_every_file_that_a_container_mounts_is_there() -> None:
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).exists()
    [source] = yaml.safe_load((FOLDER / "grafana.yml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}
    [scraped] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped["static_configs"][0]["targets"] == ["facet:8000"]


def test_the_server_has_no_right_that_it_does_not_need_and_its_variables_are_options() -> None:
    service: dict[str, Any] = COMPOSE["services"]["facet"]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for one in COMPOSE["services"].values() for port in one["ports"])
    variables = {"FACET_" + option.field.upper() for option in OPTIONS}
    assert {entry.partition("=")[0] for entry in service["environment"]} <= variables
