"""Two machines, which are two loopback addresses: the engine has the first rank, a node the second."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fake_worker import facts, reference
from live import PATIENCE
from msgspec.structs import replace
from ports import free_ports
from small_steps import read

from engine_core.config import EngineConfig, ProcessConfig
from engine_core.executor import ExecutorDead
from engine_core.ranks.layout import rank_places
from engine_core.ranks.rank_groups import LocalRanks, RemoteRanks
from engine_core.ranks.ranks_executor import RanksExecutor
from engine_core.resolve_checkpoint import make_worker_config
from engine_core.wire.sockets import ClusterKeys
from models.config import read_config
from worker.buffers import Buffer
from worker.protocol import Encode

HOST = socket.gethostname()
ENGINE, NODE = "127.0.0.2", "127.0.0.1"

Told = list[tuple[str, float, str]]


class Cluster:
    """A model with a rank on each of two machines, which have the checkpoint in different folders."""

    def __init__(self, model: Path, tmp_path: Path) -> None:
        self.here, self.there = model, tmp_path / "elsewhere" / "model"
        shutil.copytree(model, self.there)
        self.config = EngineConfig(
            model=str(model),
            tensor_parallel_size=2,
            nnodes=2,
            master_addr=ENGINE,
            master_port=free_ports(address=ENGINE),
            cluster_key="a" * 32,
        )
        self.told: Told = []
        self.nodes: list[subprocess.Popen[str]] = []
        self.executor = self._executor()

    def _executor(self) -> RanksExecutor:
        config, places = self.config, rank_places(ProcessConfig(engine=self.config))
        keys = ClusterKeys.derive(config.cluster_key or "")
        self.remote = RemoteRanks(config.master_addr, config.master_port, keys, {1: places[1:]}, self.tell)
        worker = make_worker_config(config, read_config(self.here, {}), self.here)
        groups = [self.remote, LocalRanks(places[:1], "fake_rank")]
        return RanksExecutor(worker, self.tell, places=places, groups=groups, log_level="critical")

    def tell(self, stage: str, fraction: float, detail: str = "") -> None:
        self.told.append((stage, fraction, detail))

    def join(self, **changes: object) -> subprocess.Popen[str]:
        config = replace(self.config, model=str(self.there), node_rank=1, **changes)
        options = msgspec.json.encode(config).decode()
        command = [sys.executable, "-P", "-m", "fake_node", options]
        self.nodes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return self.nodes[-1]

    def start(self) -> subprocess.Popen[str]:
        node = self.join()
        self.executor.start()
        return node

    def vanish(self) -> None:
        """End the connections from the engine to its nodes without a message."""
        remote, *local = self.executor._groups  # pyright: ignore[reportPrivateUsage]
        assert remote is self.remote
        self.remote.send = lambda frames, later=None: None
        self.remote.stop(by_force=True)
        self.executor._groups = local  # pyright: ignore[reportPrivateUsage]

    def stop(self) -> None:
        self.executor.stop()
        for node in self.nodes:
            node.kill()
            node.wait()
            if node.stderr is not None:
                node.stderr.close()


@pytest.fixture
def cluster(model: Path, tmp_path: Path, support_path: None) -> Iterator[Cluster]:
    cluster = Cluster(model, tmp_path)
    yield cluster
    cluster.stop()


def wait_until_it_says(node: subprocess.Popen[str], words: str) -> None:
    assert node.stderr is not None
    while words not in (line := node.stderr.readline()):
        assert line, "the node has ended without saying so"


def test_steps_reach_both_machines(cluster: Cluster) -> None:
    node = cluster.join()
    assert cluster.executor.start() == facts(has_idle_work=True)
    assert cluster.executor.submit(read(1, [5, 6])).result().tokens == reference([5, 6], 1)
    assert (cluster.here / "place-0").read_text() == f"tensor 0/2 stage 0/1 local 0/1 at {ENGINE}"
    assert (cluster.there / "place-1").read_text() == f"tensor 1/2 stage 0/1 local 0/1 at {NODE}"
    assert ("import", 0.0, "waiting for node 1 of 1") in cluster.told
    cluster.executor.stop()
    assert node.wait(60) == 0
    assert (cluster.there / "closed-1").exists()


def test_items_reach_both_machines_whole(cluster: Cluster) -> None:
    cluster.start()
    pixels = os.urandom(3_000_000)
    item = Encode(1, "image", (1000, 1000, 3), (1, 1, 1), 0, Buffer(memoryview(pixels)))
    step = cluster.executor.submit(replace(read(1, [5, 6]), encode=[item]))
    assert step.result().tokens == reference([5, 6], 1)
    last = cluster.there / "item-1"  # of the rank that does not answer
    deadline = time.monotonic() + PATIENCE
    while not (last.exists() and last.stat().st_size == len(pixels)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (cluster.here / "item-0").read_bytes() == last.read_bytes() == pixels


def test_the_answering_rank_may_be_on_another_machine(cluster: Cluster) -> None:
    cluster.executor.stop()
    cluster.config = replace(cluster.config, tensor_parallel_size=1, pipeline_parallel_size=2)
    cluster.executor = cluster._executor()  # pyright: ignore[reportPrivateUsage]
    cluster.start()
    item = Encode(1, "image", (1, 1, 3), (1, 1, 1), 0, Buffer(b"rgb"))
    step = cluster.executor.submit(replace(read(1, [5, 6]), encode=[item]))
    assert step.result().tokens == reference([5, 6], 1)
    cluster.executor.stop()
    assert not (cluster.there / "item-1").exists(), "a later stage gets no pixels"
    assert (cluster.here / "item-0").exists()


def test_who_has_another_key_does_not_get_in(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    stranger = cluster.join(cluster_key="b" * 32)
    wait_until_it_says(stranger, "the engine refuses this machine")
    cluster.start()
    assert "a connection was refused" in caplog.text
    assert cluster.executor.submit(read(1, [5, 6])).result().tokens == reference([5, 6], 1)


def test_a_machine_that_is_lost_in_a_step_is_named(cluster: Cluster) -> None:
    node = cluster.start()
    rank = int((cluster.there / "pid-1").read_text())
    os.kill(rank, signal.SIGSTOP)
    step = cluster.executor.submit(read(1, [5]))
    step.result()
    node.kill()
    with pytest.raises(ExecutorDead, match=r"rank 1 .* the connection to its machine is lost"):
        while True:
            cluster.executor.check()
    assert_gone(rank)


def test_an_engine_that_is_lost_before_it_begins_is_told(cluster: Cluster) -> None:
    node = cluster.join()
    wait_until_it_says(node, "connected to the engine")
    cluster.vanish()
    assert node.wait(60) == 1
    assert "the engine has gone before it sent the options" in node.stderr.read()


def test_an_engine_that_is_lost_ends_its_ranks_elsewhere(cluster: Cluster) -> None:
    node = cluster.start()
    rank = int((cluster.there / "pid-1").read_text())
    cluster.vanish()
    began = time.monotonic()
    assert node.wait(60) == 1
    assert_gone(rank)
    assert time.monotonic() - began < 2 * PATIENCE
    assert node.stderr is not None and "the engine has gone" in node.stderr.read()


def test_a_rank_that_dies_elsewhere_is_named_with_its_machine(cluster: Cluster) -> None:
    (cluster.there / "no-weights").touch()
    with pytest.raises(ExecutorDead) as caught:
        cluster.start()
    assert str(caught.value) == (
        f"rank 1 (tensor 1 of 2, stage 0 of 1, on {HOST}) ended while loading libraries: model.safetensors: "
        "tensor 'lm_head.weight' is missing"
    )
    cluster.executor.stop()
    assert cluster.nodes[0].wait(60) == 1


def test_another_model_elsewhere_is_refused(cluster: Cluster) -> None:
    config = cluster.there / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 8', '"hidden_size": 16'))
    with pytest.raises(ExecutorDead, match=r"rank 1 .*elsewhere/model is not the model that the engine has"):
        cluster.start()
    assert cluster.nodes[0].wait(60) == 2


def test_a_node_that_leaves_before_it_is_needed_can_come_again(cluster: Cluster) -> None:
    first = cluster.join()
    wait_until_it_says(first, "connected to the engine")
    first.kill()
    first.wait()
    assert cluster.remote._monitor.poll(60_000), "the connection has ended"  # pyright: ignore[reportPrivateUsage]
    cluster.start()
    assert cluster.executor.submit(read(1, [5, 6])).result().tokens == reference([5, 6], 1)


def test_a_port_that_is_taken_is_named(cluster: Cluster) -> None:
    with pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.2:\d+ \(Address already in use\)"):
        cluster._executor()  # pyright: ignore[reportPrivateUsage]


def test_an_address_that_nobody_has_is_named(cluster: Cluster) -> None:
    cluster.config = replace(cluster.config, master_addr="no.such.host.invalid")
    with pytest.raises(OSError, match=r"cannot listen on no\.such\.host\.invalid:\d+ \(\D+\): --master-addr"):
        cluster._executor()  # pyright: ignore[reportPrivateUsage]


def assert_gone(pid: int) -> None:
    deadline = time.monotonic() + 2 * PATIENCE
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.01)
