"""The Ray cluster file as Ray itself reads it, and the options it names against the commands they go to."""

import re
from typing import Any

import pytest
import yaml
from deploy_tools import DEPLOY

from server.options.parse_server_options import OPTIONS

FILE = DEPLOY / "ray" / "cluster.yaml"


def test_ray_takes_the_file() -> None:
    """As `ray up` does: what the file leaves out is filled in, then the whole is held against the schema."""
    util: Any = pytest.importorskip("ray.autoscaler._private.util")
    cluster = util.prepare_config(yaml.safe_load(FILE.read_text()))
    util.validate_config(cluster)
    assert cluster["provider"]["type"] == "local" and cluster["max_workers"] == 1
    with pytest.raises(Exception, match="was unexpected"):
        util.validate_config({**cluster, "unknown": 1})


def test_options_of_ray_start_are_there() -> None:
    scripts: Any = pytest.importorskip("ray.scripts.scripts")
    known = {name for option in scripts.start.params for name in option.opts}
    cluster = yaml.safe_load(FILE.read_text())
    for part in ("head_start_ray_commands", "worker_start_ray_commands"):
        started = [line.split("ray start", 1)[1] for line in cluster[part] if "ray start" in line]
        assert len(started) == 1
        named = set(re.findall(r"--[a-z-]+", started[0]))
        assert named and named <= known


def test_options_of_serve_are_there() -> None:
    (line,) = (line for line in FILE.read_text().splitlines() if "facet serve MODEL" in line)
    known = {name for option in OPTIONS for name in option.flags}
    named = set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", line.split("facet serve", 1)[1]))
    assert {"-tp", "--host", "--distributed-executor-backend"} <= named <= known
