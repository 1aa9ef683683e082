"""Engines of several machines meet before their ranks start; loopback has an address for each machine."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from ports import free_ports

from engine_core.config import EngineConfig, ProcessConfig, Replicas
from engine_core.executor import ExecutorDead, OtherEngineDead
from engine_core.ranks import rendezvous
from engine_core.ranks.rendezvous import Rendezvous, meet

HOST, KEY = "127.0.0.2", "a secret that all machines know"
SECONDS = 20


@pytest.fixture
def port() -> int:
    """A free port, and so is the one before it."""
    return free_ports(2, HOST) + 1


def engine(index: int, size: int, port: int, **more: object) -> ProcessConfig:
    given = {"secret": KEY, "first": index, "here": 1, "address": HOST, **more}
    replicas = Replicas(size=size, together=True, port=port, **given)  # pyright: ignore
    return ProcessConfig(engine=EngineConfig(model=""), replicas=replicas, index=index)


def come(pool: ThreadPoolExecutor, *engines: ProcessConfig) -> list[Future[Rendezvous]]:
    return [pool.submit(meet, each, lambda phase, fraction, detail="": None) for each in engines]


def close(meetings: Sequence[Rendezvous]) -> None:
    for met in meetings:
        for sock in met.sockets.values():
            sock.close()


def test_all_are_connected_each_with_each_and_know_where_their_ranks_meet(port: int) -> None:
    with ThreadPoolExecutor() as pool:
        found = come(pool, *(engine(index, 4, port) for index in (3, 1, 0, 2)))
        third, first, zero, second = (each.result(SECONDS) for each in found)
    meetings = [zero, first, second, third]
    assert len({met.rendezvous for met in meetings}) == 1 and zero.rendezvous.startswith(f"tcp://{HOST}:")
    assert zero.address == HOST and all(met.address for met in meetings)
    for index, met in enumerate(meetings):
        assert met.sockets.keys() == {0, 1, 2, 3} - {index}
        for other, sock in met.sockets.items():
            sock.send(bytes([index, other]))
    for index, met in enumerate(meetings):
        for other, sock in met.sockets.items():
            sock.settimeout(SECONDS)
            assert sock.recv(2) == bytes([other, index])
    close(meetings)


def test_another_key_opens_nothing(port: int) -> None:
    with ThreadPoolExecutor() as pool:
        [host] = come(pool, engine(0, 2, port))
        [stranger] = come(pool, engine(1, 2, port, secret="another secret that is as long"))
        with pytest.raises(OtherEngineDead, match=r"have not met: .*is its cluster key the same\?"):
            stranger.result(SECONDS)
        assert not host.done()
        [guest] = come(pool, engine(1, 2, port))
        close([host.result(SECONDS), guest.result(SECONDS)])


def test_sizes_that_differ_are_told(port: int) -> None:
    with ThreadPoolExecutor() as pool:
        [host] = come(pool, engine(0, 2, port))
        [guest] = come(pool, engine(2, 3, port))
        with pytest.raises(ExecutorDead, match=r"^engine 0 is one of 2 that share experts: give all"):
            guest.result(SECONDS)
        [guest] = come(pool, engine(1, 2, port))
        close([host.result(SECONDS), guest.result(SECONDS)])


def test_one_that_leaves_before_all_have_come_is_waited_for_again(port: int) -> None:
    with ThreadPoolExecutor() as pool:
        [host] = come(pool, engine(0, 3, port))
        key = rendezvous._key_of(KEY)  # pyright: ignore[reportPrivateUsage]
        until = time.monotonic() + SECONDS
        while True:
            try:
                sock = socket.create_connection((HOST, port - 1))
                break
            except ConnectionRefusedError:
                assert time.monotonic() < until
                time.sleep(0.01)
        line = rendezvous._Line(sock, key, calls=True)  # pyright: ignore[reportPrivateUsage]
        line.send(rendezvous.RendezvousHello(1, 3, 1))
        sock.close()
        others = come(pool, engine(2, 3, port), engine(1, 3, port))
        close([each.result(SECONDS) for each in (host, *others)])


def test_a_machine_without_that_address_is_told(port: int) -> None:
    with pytest.raises(ExecutorDead, match=r"^cannot listen at 192\.0\.2\.1:.* --data-parallel-address has"):
        meet(engine(0, 2, port, address="192.0.2.1"), lambda phase, fraction, detail="": None)


def test_one_of_this_machine_that_does_not_come_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_LOCAL_SECONDS", 0.01)
    process = ProcessConfig(
        engine=EngineConfig(model=""), replicas=Replicas(size=2, here=2, together=True), folder=str(tmp_path)
    )
    with pytest.raises(OtherEngineDead, match="have not met: 1 ranks have not come"):
        meet(process, lambda phase, fraction, detail="": None)
