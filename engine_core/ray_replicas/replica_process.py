"""The process that has Ray run one replica, and lives as long as that.

It takes the place of the engine's own process, so that the replica is started again, elsewhere if need be,
when it ends. Requests and answers do not go through Ray: the engine connects to the API servers as those of
headless machines do. Its exit codes are those of worker/child.py.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import Any

import msgspec
import zmq
from msgspec.structs import replace

from engine_core.config import ProcessConfig
from engine_core.engine_children import start_engines
from engine_core.protocol import Dead
from engine_core.ranks.ray_ranks import connect, resources
from engine_core.restarts import NoWatcher, keep_engines
from engine_core.wire.transport import EngineEnd
from models.plugins import Registrations, use_registrations
from worker import child, logs
from worker.child import BROKE, CANNOT_START, STOPPED

_FLAG = "--data-parallel-backend ray"
_PATIENCE = 10.0
"""Seconds in which a cluster with room has an actor, after which a word is said, and a server listens."""
_LOOK_SECONDS = 0.2

_log = logging.getLogger(__name__)


class ReplicaActor:
    """The actor that Ray runs for a replica. Its options are bytes, so that nothing of ours is pickled."""

    def place(self) -> str:
        """The address of its machine."""
        from ray.util import get_node_ip_address  # pyright: ignore # where this runs, Ray is there

        return get_node_ip_address()

    def run(self, options: bytes) -> int:
        """Runs the engine, and starts it again if it breaks; returns its last exit code."""
        config = msgspec.msgpack.decode(options, type=ProcessConfig)
        use_registrations(Registrations(config.model_classes, config.search_path))
        logs.setup(f"replica {config.index}", config.log_level)
        engines = start_engines(
            config.engine,
            replace(config.replicas, first=config.index, here=1, by_ray=False),
            addresses=config.servers,
            drain_seconds=config.drain_seconds,
            log_level=config.log_level,
            debug_steps=config.debug_steps,
        )
        try:
            asyncio.run(keep_engines(engines, NoWatcher()))
            code = engines.engines[0].exit_code
            return BROKE if code is None else code
        finally:
            engines.stop(0)


def main() -> int:
    """Has Ray run a replica, and returns its exit code."""
    options = child.adopt(int(sys.argv[1]))
    config = msgspec.msgpack.decode(options, type=ProcessConfig)
    logs.setup(f"replica {config.index} in Ray", config.log_level)
    try:
        ray, _ = connect(_FLAG)
    except (ValueError, OSError) as error:
        _explain(config, logs.one_line(error))
        return CANNOT_START
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
    each = resources(ray, config.engine, config.engine.ranks)
    wanted = ", ".join(f"{amount:g} {name}" for name, amount in each.items())
    # Over several machines, since those of a CPU would share its cores.
    placed = {"num_cpus": each.get("CPU", 0), "num_gpus": each.get("GPU", 0), "scheduling_strategy": "SPREAD"}
    actor = ray.remote(ReplicaActor).options(**placed).remote()
    try:
        return _follow(ray, actor, options, config.index, wanted)
    finally:
        ray.kill(actor)
        ray.shutdown()


def _follow(ray: Any, actor: Any, options: bytes, index: int, wanted: str) -> int:
    try:
        place = actor.place.remote()
        if not ray.wait([place], timeout=_PATIENCE)[0]:
            _log.warning("Ray finds no room for replica %d (%s) yet: `ray status` tells why", index, wanted)
        _log.info("Ray has placed replica %d at %s", index, ray.get(place))
        running = actor.run.remote(options)
        while not ray.wait([running], timeout=_LOOK_SECONDS)[0]:  # a signal is heard between two looks
            pass
        return ray.get(running)
    except ray.exceptions.RayError as error:
        _log.error("the Ray actor of replica %d has ended: %s", index, str(error).partition("\n")[0])
        return BROKE


def _explain(config: ProcessConfig, reason: str) -> None:
    """Tell servers and the log why there will be no replica."""
    context = zmq.Context()
    for end in [EngineEnd(context, address, config.index) for address in config.servers]:
        end.send(Dead(reason))
        end.monitor.poll(int(_PATIENCE * 1000))  # it may have failed before a server listens
        end.close()
    context.term()
    logs.print_error(reason)


if __name__ == "__main__":
    sys.exit(main())
