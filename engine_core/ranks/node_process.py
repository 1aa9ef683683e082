"""The node, a process that runs ranks for an engine on another machine.

It connects to the engine, starts the ranks, relays frames between both, and ends with the engine. The
checkpoint comes from this machine's own disk or from the hub; everything else comes from the engine.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator

import msgspec
import zmq
from msgspec.structs import replace

from engine_core.config import EngineConfig, ProcessConfig
from engine_core.ranks import rank_groups
from engine_core.ranks.layout import backend_of
from engine_core.ranks.rank_groups import LocalRanks
from engine_core.ranks.rendezvous import free_port
from engine_core.resolve_checkpoint import find_checkpoint, find_drafter
from engine_core.wire import sockets
from models.config import read_config
from worker import logs
from worker.child import BROKE, CANNOT_START, STOPPED
from worker.ranks.channel import RankFailed, RankMessage, RankProgress

_ENDS = {rank_groups.STOP: STOPPED, rank_groups.KILL: BROKE}
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 1000

_log = logging.getLogger(__name__)


def run_node(config: EngineConfig, log_level: str, module: str = "worker.rank_process") -> int:
    """Runs a node until the engine ends or vanishes; returns the exit code. `module` is what ranks run."""
    logs.setup(f"node {config.node_rank}", log_level)
    backend_of(ProcessConfig(engine=config))
    if config.node_rank == 0:
        raise ValueError("--node-rank 0 is the machine with the API: start it without --headless")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(STOPPED))
    return Node(config, module).run()


class Node:
    def __init__(self, config: EngineConfig, module: str) -> None:
        """`config` names the engine's address, the number of this node, and the cluster key."""
        self._config = config
        self._module = module
        self._local = LocalRanks(())
        self._encoder = msgspec.msgpack.Encoder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = rank_groups.guarded_socket(self._context, zmq.DEALER)
        self._dealer.setsockopt(zmq.ROUTING_ID, rank_groups.node_name(config.node_rank))
        self._dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._monitor = self._dealer.get_monitor_socket(
            sockets.CONNECTED | sockets.DISCONNECTED | sockets.REFUSED
        )
        self._connected = False
        self._warned = False

    def run(self) -> int:
        code = BROKE
        try:
            self._connect()
            task = self._wait_for_task()
            code = task if isinstance(task, int) else self._work(task)
            return code
        finally:
            self._local.stop(by_force=code != STOPPED)  # ranks hang if others have ended
            sockets.stop_monitor(self._dealer, self._monitor)
            self._dealer.close()
            self._context.term()

    def _connect(self) -> None:
        host, port = self._config.master_addr, self._config.master_port
        sockets.ClusterKeys.derive(self._config.cluster_key or "").present(self._dealer)
        address = _own_address(host, port)
        self._dealer.connect(f"tcp://{host}:{port}")
        node = self._config.node_rank
        hello = rank_groups.NodeHello(
            node, rank_groups.PROTOCOL, socket.gethostname(), address, free_port(address)
        )
        self._dealer.send(self._encoder.encode(hello))
        _log.info("waiting for the engine at %s:%d", host, port)

    def _wait_for_task(self) -> rank_groups.NodeTask | int:
        """The engine's first message, or the exit code if the engine ends before it has sent one."""
        while not self._engine_left():
            self._wait()
            for frame, *_ in self._messages():
                if frame in _ENDS:
                    return _ENDS[frame]
                return msgspec.msgpack.decode(frame, type=rank_groups.NodeTask)
        _log.error("the engine has gone before it sent the options of the ranks")
        return BROKE

    def _work(self, task: rank_groups.NodeTask) -> int:
        try:
            self._start(task)
        except Exception as error:
            _log.debug("the ranks cannot start", exc_info=True)
            self._send(task, RankFailed(logs.one_line(error), time.time()))
            return CANNOT_START
        return self._relay()

    def _start(self, task: rank_groups.NodeTask) -> None:
        config = self._config

        def report(fraction: float) -> None:
            self._send(task, RankProgress("download", fraction))

        folder, theirs = find_checkpoint(config, report), task.config.drafter
        if read_config(folder, config.hf_overrides) != task.config.model:
            raise ValueError(f"{config.model} in {folder} is not the model that the engine has")
        worker_config = replace(task.config, folder=str(folder))
        drafter = find_drafter(config, worker_config, 1, report)
        if (drafter and replace(drafter, folder="")) != (theirs and replace(theirs, folder="")):
            raise ValueError("its drafter is not the engine's: give the same --speculative-config everywhere")
        self._local = LocalRanks(task.places, self._module)
        self._local.start(replace(worker_config, drafter=drafter), task.log_level)

    def _relay(self) -> int:
        while not self._engine_left():
            self._wait()
            for rank, frame in self._local.receive():
                self._dealer.send_multipart([b"%d" % rank, frame])
            for frames in self._messages():
                if frames[0] in _ENDS:
                    return _ENDS[frames[0]]
                self._local.send(frames)
        _log.error("the engine has gone: its ranks on this machine end")
        return BROKE

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        self._local.register(poller)
        poller.poll()

    def _messages(self) -> Iterator[list[bytes]]:
        """The frames of each message that has come."""
        while self._dealer.poll(0):
            frames = self._dealer.recv_multipart()
            if frames[0] != rank_groups.PING:
                yield frames

    def _send(self, task: rank_groups.NodeTask, message: RankMessage) -> None:
        """Send a message in the name of the node's first rank, while its ranks do not run yet."""
        self._dealer.send_multipart([b"%d" % task.places[0].rank, self._encoder.encode(message)])

    def _engine_left(self) -> bool:
        for event, _ in sockets.socket_events(self._monitor):
            if event == sockets.CONNECTED:
                self._connected = True
                _log.info("connected to the engine")
            elif event == sockets.DISCONNECTED and self._connected:
                return True
            elif event != sockets.DISCONNECTED and not self._warned:
                self._warned = True
                _log.warning("the engine refuses this machine: is the cluster key the same there?")
        return False


def _own_address(host: str, port: int) -> str:
    """The address of this machine as the other one sees it. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise OSError(f"--master-addr {host} cannot be reached: {error.strerror}") from error
        return probe.getsockname()[0]
