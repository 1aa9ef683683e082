"""The ranks that hold a model, and the machine on which each runs, which follow from options alone."""

from __future__ import annotations

import logging

from engine_core.config import EngineConfig, ProcessConfig, cluster_key_needed
from engine_core.options.expert_options import placement_of, transport_of
from models.config import ConfigError, ModelConfig
from models.parallel.experts import check_experts, count_experts
from models.parallel.rank_shares import check_cut
from worker.config import Place

_log = logging.getLogger(__name__)


def check_layout(config: EngineConfig, model: ModelConfig, expert_replicas: int = 1) -> None:
    """Refuse a layout into which the model cannot be cut. So many replicas share experts, if any do."""
    check_cut(model, config.tensor_parallel_size, config.pipeline_parallel_size)
    transport_of(config)
    placement_of(config)
    if not config.enable_expert_parallel:
        return
    ranks = config.tensor_parallel_size * expert_replicas
    if expert_replicas > 1 and (count := count_experts(model)) % ranks:
        raise ConfigError(
            f"--enable-expert-parallel: {count} experts cannot be divided evenly among {ranks} ranks, which "
            f"--tensor-parallel-size {config.tensor_parallel_size} times --data-parallel-size "
            f"{expert_replicas} makes; choose sizes whose product divides {count}, or leave the option out, "
            "and each replica holds all experts"
        )
    check_experts(model, ranks)
    if ranks == 1:
        _log.warning(
            "--enable-expert-parallel does nothing: experts are shared among the workers of "
            "--tensor-parallel-size and --data-parallel-size, which are 1"
        )


def backend_of(process: ProcessConfig) -> str:
    """The way in which workers run: "uni", "mp" or "ray". Raises ValueError if options contradict it."""
    config = process.engine
    ranks, nodes, backend = config.ranks, config.nnodes, config.distributed_executor_backend
    if process.expert_replicas > 1:
        if backend not in (None, "mp"):
            raise ValueError(
                f"--distributed-executor-backend {backend}: replicas that share experts "
                "(--enable-expert-parallel with --data-parallel-size) have workers in processes of their "
                "own: leave it out, or choose mp"
            )
        if nodes > 1:
            raise ValueError(
                f"--nnodes {nodes} spreads one replica over machines, and each of those that share experts "
                "(--enable-expert-parallel with --data-parallel-size) is on one: leave out one of the three"
            )
        return "mp"
    if backend not in (None, "uni", "mp", "ray"):
        raise ValueError(f"--distributed-executor-backend is '{backend}'; it can be uni, mp or ray")
    asked = (
        f"--tensor-parallel-size {config.tensor_parallel_size} times --pipeline-parallel-size "
        f"{config.pipeline_parallel_size}"
    )
    if backend == "uni" and ranks > 1:
        raise ValueError(
            f"--distributed-executor-backend uni is one worker in the engine's process, and {asked} makes "
            f"{ranks}: leave it out, or choose mp or ray"
        )
    if nodes > 1:
        _check_nodes(config, asked, process.replicas.here)
    return backend or ("mp" if ranks > 1 else "uni")


def _check_nodes(config: EngineConfig, asked: str, local_engines: int) -> None:
    flag, last = f"--nnodes {config.nnodes}", config.nnodes - 1
    if config.distributed_executor_backend not in (None, "mp"):
        raise ValueError(
            f"{flag} goes with --distributed-executor-backend mp, and not with "
            f"{config.distributed_executor_backend}: leave one of them out"
        )
    if config.ranks % config.nnodes:
        raise ValueError(
            f"{flag}: {asked} makes {config.ranks} workers, which cannot be divided evenly among so many "
            "machines"
        )
    if not 0 <= config.node_rank <= last:
        raise ValueError(f"--node-rank {config.node_rank}: with {flag} it can be 0 to {last}")
    if local_engines > 1:
        raise ValueError(
            f"{flag} spreads one replica over machines, and {local_engines} are to start here: start one "
            "`serve` for each of them, with ports of its own"
        )
    if not config.cluster_key:
        raise cluster_key_needed(flag)


def rank_places(process: ProcessConfig, expert_rendezvous: str = "", address: str = "") -> list[Place]:
    """The places of all ranks, machine by machine, equally many on each, those of a stage side by side.

    `expert_rendezvous`: where ranks of all replicas meet that share experts; `address`: that of this machine,
    if some of them are on others.
    """
    config, replicas = process.engine, process.replicas
    per_node, tensor_size = config.ranks // config.nnodes, config.tensor_parallel_size
    several_nodes, shares = config.nnodes > 1, config.enable_expert_parallel
    alone = process.alone and process.expert_replicas == 1
    first_local_rank = (process.index - replicas.first) * per_node
    first_expert_rank = process.index * tensor_size if process.expert_replicas > 1 else 0
    return [
        Place(
            tensor_rank=rank % tensor_size,
            tensor_size=tensor_size,
            stage=rank // tensor_size,
            stages=config.pipeline_parallel_size,
            local_rank=first_local_rank + rank % per_node,
            local_ranks=replicas.here * per_node,
            rendezvous=f"tcp://{config.master_addr}:{config.master_port + 1}" if several_nodes else "",
            address=address or (config.master_addr if several_nodes else "127.0.0.1"),
            replica=None if alone else process.index,
            expert_rank=first_expert_rank + rank % tensor_size if shares else 0,
            expert_size=tensor_size * process.expert_replicas if shares else 1,
            expert_placement=placement_of(config),
            expert_transport=transport_of(config),
            expert_replicas=process.expert_replicas,
            expert_rendezvous=expert_rendezvous,
        )
        for rank in range(config.ranks)
    ]
