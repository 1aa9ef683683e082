"""A machine without an API: which API server it joins, and when it refuses. Whole runs are in tests/e2e."""

import pytest

from engine_core.config import Address, EngineConfig
from engine_core.protocol import PROTOCOL, Welcome
from engine_core.wire.headless_join import Refused
from server.options.parse_server_options import parse
from server.run import headless

KEY = ["--cluster-key", "a secret of sixteen characters or more", "--headless"]


@pytest.mark.parametrize(
    ("size", "first", "reason"),
    [
        (2, 1, r"expects --data-parallel-size 4, and here it is 2"),
        (4, 1, r"--data-parallel-start-rank 1: the first 2 replicas run beside .*; give 2 or more"),
    ],
)
def test_machines_must_agree_on_the_numbers_of_replicas(
    size: int, first: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Address] = []

    def join(address: Address) -> Welcome:
        asked.append(address)
        return Welcome(PROTOCOL, servers=1, replicas=4, local_replicas=2)

    monkeypatch.setattr(headless, "join", join)
    config = parse(["-dp", str(size), "--data-parallel-start-rank", str(first), *KEY], {})
    with pytest.raises(Refused, match=reason):
        headless.run(config)
    assert [address.requests for address in asked] == ["tcp://127.0.0.1:29550"]


def test_a_node_runs_ranks_and_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, str]] = []

    def run_node(config: EngineConfig, log_level: str) -> int:
        told.append((config.node_rank, log_level))
        return 7

    monkeypatch.setattr(headless, "run_node", run_node)
    assert headless.run(parse(["--nnodes", "2", "--node-rank", "1", *KEY], {})) == 7
    assert told == [(1, "info")]
