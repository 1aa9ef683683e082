"""The Helm chart, rendered by Helm's own code: valid manifests, which drain and probe as the server does."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_tools import DEPLOY, render_chart, run

from server.options.parse_server_options import parse

EVERYTHING = {
    "apiKeySecret": "keys",
    "autoscaling": {"enabled": True},
    "podMonitor": {"enabled": True},
    "cache": {"claim": "models"},
    "env": [{"name": "HF_TOKEN", "value": "x"}],
    "args": ["--max-model-len", "8192"],
    "nodeSelector": {"pool": "models"},
    "runtimeClassName": "nvidia",
}
ENGINES = {
    "headless": {"pods": 2, "enginesPerPod": 2, "local": 1, "clusterKeySecret": "cluster"},
    "runtimeClassName": "nvidia",
}
VALUES = pytest.mark.parametrize(
    "values", [{}, EVERYTHING, ENGINES], ids=["as it is", "everything", "engines"]
)
NO_SCHEMA = {"PodMonitor"}
"""Kinds that are not Kubernetes' own."""


def manifests(values: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """The manifests by kind and name."""
    texts = render_chart(values).values()
    found = [one for text in texts for one in yaml.safe_load_all(text) if one]
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


@VALUES
def test_every_manifest_fits_the_schema_of_kubernetes(values: dict[str, Any], tmp_path: Path) -> None:
    for number, manifest in enumerate(manifests(values).values()):
        if manifest["kind"] not in NO_SCHEMA:
            path = tmp_path / f"{number}.json"
            path.write_text(json.dumps(manifest))
            run("kubernetes-validate", "--strict", path)


@VALUES
def test_a_pod_ends_after_the_server_has_drained(values: dict[str, Any]) -> None:
    pod = manifests(values)["Deployment", "test"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    probes = [container[name]["httpGet"]["path"] for name in ("livenessProbe", "readinessProbe")]
    assert probes == ["/live", "/ready"]
    delay = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = next(
        int(arg.partition("=")[2]) for arg in container["args"] if arg.startswith("--shutdown-timeout")
    )
    assert pod["terminationGracePeriodSeconds"] > delay + drain


@VALUES
def test_containers_run_with_no_right_that_is_not_needed(values: dict[str, Any]) -> None:
    for (kind, _), manifest in manifests(values).items():
        if kind in ("Deployment", "StatefulSet"):
            pod = manifest["spec"]["template"]["spec"]
            security = pod["containers"][0]["securityContext"]
            assert pod["securityContext"]["runAsNonRoot"] and security["readOnlyRootFilesystem"]
            assert security["capabilities"] == {"drop": ["ALL"]}


def test_every_pod_runs_in_the_runtime_class_that_is_named() -> None:
    pods = {
        name: manifest["spec"]["template"]["spec"]
        for (kind, name), manifest in manifests(ENGINES).items()
        if kind in ("Deployment", "StatefulSet")
    }
    assert {name: pod["runtimeClassName"] for name, pod in pods.items()} == {
        "test": "nvidia",
        "test-engine": "nvidia",
    }
    assert "runtimeClassName" not in manifests({})["Deployment", "test"]["spec"]["template"]["spec"]


def test_what_is_asked_for_is_there_and_nothing_else() -> None:
    plain = {kind for kind, _ in manifests({})}
    assert plain == {"Deployment", "Service", "PodDisruptionBudget"}
    more = {kind for kind, _ in manifests(EVERYTHING)}
    assert more == plain | {"HorizontalPodAutoscaler", "PodMonitor"}
    assert {kind for kind, _ in manifests(ENGINES)} == plain | {"StatefulSet"}


def test_engines_in_pods_of_their_own_are_numbered_through() -> None:
    found = manifests(ENGINES)
    api = found["Deployment", "test"]["spec"]["template"]["spec"]["containers"][0]
    config = parse([arg.replace("$(POD_IP)", "10.0.0.1") for arg in api["args"]], _environ())
    assert (config.replicas.size, config.replicas.here) == (5, 1)
    engines = found["StatefulSet", "test-engine"]["spec"]["template"]["spec"]["containers"][0]
    script, model, *others = engines["args"]
    words = script.removeprefix("exec facet serve ").replace('"$0"', model).replace('"$@"', " ".join(others))
    firsts = []
    for pod in range(2):
        arguments = words.replace("$((1 + POD_INDEX * 2))", str(1 + pod * 2)).split()
        replicas = parse(arguments, _environ()).replicas
        firsts.append((replicas.first, replicas.here, replicas.address))
    assert firsts == [(1, 2, "test-engines"), (3, 2, "test-engines")]


def _environ() -> dict[str, str]:
    return {"FACET_CLUSTER_KEY": "0" * 64}


def test_engines_need_a_key_and_one_api_pod() -> None:
    with pytest.raises(AssertionError, match="clusterKeySecret"):
        render_chart({"headless": {"pods": 1}})
    for more in ({"replicas": 2}, {"autoscaling": {"enabled": True}}):
        with pytest.raises(AssertionError, match="set replicas to 1, and autoscaling"):
            render_chart({**more, "headless": {"pods": 1, "clusterKeySecret": "k"}})


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((DEPLOY / "helm" / "facet" / "Chart.yaml").read_text())
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    assert f'version = "{chart["appVersion"]}"' in project
