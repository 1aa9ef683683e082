"""Lints a chart and prints its manifests for given values, as JSON, by Helm's own code.

It runs in the environment of `make deploy-tools`: python helm_render.py CHART VALUES
"""

import json
import sys

import helm_python as helm  # pyright: ignore[reportMissingImports]


def main(chart: str, values: dict[str, object]) -> None:
    findings = helm.lint(chart, values, strict=True)
    with helm.Chart.load(chart) as loaded:
        manifests = loaded.render(values, name="test", namespace="default")
    print(json.dumps({"findings": findings, "manifests": manifests}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
