"""A machine that lends its ranks to an engine elsewhere: dials in, starts them, relays frames, ends with it.

The checkpoint comes from this machine's own disk or from the hub; everything else about the ranks comes from
the engine.
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

from engine_core.config import EngineConfig
from engine_core.ranks.layout import backend_of
from engine_core.ranks.local import LocalCrew
from engine_core.ranks.remote import (
    KILL,
    PING,
    PROTOCOL,
    STOP,
    NodeHello,
    NodeTask,
    guarded_socket,
    node_name,
)
from engine_core.wire import socket_events
from engine_core.wire.keys import ClusterKeys
from models.checkpoint.hub import resolve
from models.config import read_config
from worker import logs
from worker.child import BROKE, CANNOT_START, STOPPED
from worker.ranks.channel import RankFailed, RankMessage, RankProgress

_ENDS = {STOP: STOPPED, KILL: BROKE}
_REDIAL_MS, _SLOWEST_REDIAL_MS = 100, 1000

_log = logging.getLogger(__name__)


def run_node(config: EngineConfig, log_level: str, module: str = "worker.ranks.process") -> int:
    """For a process of its own. Returns its exit code when the engine has ended, or gone.

    `module` is what ranks run, by `python -m`.
    """
    logs.setup(f"node {config.node_rank}", log_level)
    backend_of(config)
    if config.node_rank == 0:
        raise ValueError("--node-rank 0 is the machine with the API: start it without --headless")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(STOPPED))
    return Node(config, module).run()


class Node:
    def __init__(self, config: EngineConfig, module: str) -> None:
        """The engine is at master_addr, this is node_rank, and cluster_key lets it in."""
        self._config = config
        self._module = module
        self._crew = LocalCrew(())
        self._encoder = msgspec.msgpack.Encoder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = guarded_socket(self._context, zmq.DEALER)
        self._dealer.setsockopt(zmq.ROUTING_ID, node_name(config.node_rank))
        self._dealer.setsockopt(zmq.RECONNECT_IVL, _REDIAL_MS)
        self._dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _SLOWEST_REDIAL_MS)
        self._monitor = self._dealer.get_monitor_socket(
            socket_events.CONNECTED | socket_events.DISCONNECTED | socket_events.REFUSED
        )
        self._inside = False
        self._warned = False

    def run(self) -> int:
        code = BROKE
        try:
            self._dial()
            task = self._wait_for_task()
            code = task if isinstance(task, int) else self._work(task)
            return code
        finally:
            self._crew.stop(at_once=code != STOPPED)  # ranks hang if others have ended
            socket_events.stop(self._dealer, self._monitor)
            self._dealer.close()
            self._context.term()

    def _dial(self) -> None:
        host, port = self._config.master_addr, self._config.master_port
        ClusterKeys.derive(self._config.cluster_key or "").present(self._dealer)
        address = _own_address(host, port)
        self._dealer.connect(f"tcp://{host}:{port}")
        node = self._config.node_rank
        hello = NodeHello(node, PROTOCOL, socket.gethostname(), address, _free_port(address))
        self._dealer.send(self._encoder.encode(hello))
        _log.info("waiting for the engine at %s:%d", host, port)

    def _wait_for_task(self) -> NodeTask | int:
        """Or the exit code, if the engine ends before it has said anything."""
        while not self._engine_left():
            self._wait()
            for frame in self._frames():
                if frame in _ENDS:
                    return _ENDS[frame]
                return msgspec.msgpack.decode(frame, type=NodeTask)
        _log.error("the engine has gone before it said what to do")
        return BROKE

    def _work(self, task: NodeTask) -> int:
        try:
            self._start(task)
        except Exception as error:
            _log.debug("the ranks cannot start", exc_info=True)
            self._say(task, RankFailed(logs.one_line(error), time.time()))
            return CANNOT_START
        return self._relay()

    def _start(self, task: NodeTask) -> None:
        config = self._config
        folder = resolve(
            config.model,
            config.revision,
            config.download_dir,
            lambda fraction: self._say(task, RankProgress("download", fraction)),
            config.worker.load_format,
        )
        if read_config(folder, config.hf_overrides) != task.config.model:
            raise ValueError(f"{config.model} in {folder} is not the model that the engine has")
        self._crew = LocalCrew(task.places, self._module)
        self._crew.start(replace(task.config, folder=str(folder)), task.log_level)

    def _relay(self) -> int:
        while not self._engine_left():
            self._wait()
            for rank, said in self._crew.news():
                self._dealer.send_multipart([b"%d" % rank, said])
            for frame in self._frames():
                if frame in _ENDS:
                    return _ENDS[frame]
                self._crew.send(frame)
        _log.error("the engine has gone: its ranks on this machine end")
        return BROKE

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        self._crew.register(poller)
        poller.poll()

    def _frames(self) -> Iterator[bytes]:
        while self._dealer.poll(0):
            frame = self._dealer.recv()
            if frame != PING:
                yield frame

    def _say(self, task: NodeTask, what: RankMessage) -> None:
        """In the name of the first of its ranks, while these have no voice."""
        self._dealer.send_multipart([b"%d" % task.places[0].rank, self._encoder.encode(what)])

    def _engine_left(self) -> bool:
        """It was there, and its connection has ended."""
        for event, _ in socket_events.events(self._monitor):
            if event == socket_events.CONNECTED:
                self._inside = True
                _log.info("the engine has let this machine in")
            elif event == socket_events.DISCONNECTED and self._inside:
                return True
            elif event != socket_events.DISCONNECTED and not self._warned:
                self._warned = True
                _log.warning("the engine refuses this machine: is the cluster key the same there?")
        return False


def _own_address(host: str, port: int) -> str:
    """Of this machine, as it is seen from there. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise OSError(f"--master-addr {host} cannot be reached: {error.strerror}") from error
        return probe.getsockname()[0]


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
