"""The ranks that hold one model together: how they find each other, and how tensors travel between them.

Every purpose has a group of its own. NCCL runs the operations of one group in order, so tokens that go back
to the first stage must not wait behind streams that go forward.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from models.ops.tree_sum import add_in_pairs
from models.parallel.experts import ExpertPlace
from models.parallel.parallel import Collectives, Exchange, Parallel, Replicas
from worker.config import Place, WorkerConfig
from worker.ranks.socket_carrier import SocketCarrier

TIMEOUT = timedelta(minutes=10)
"""The longest time that a rank waits for another within a step. Between steps a dead one is seen at once."""


class ProcessGroup(Protocol):
    """The methods that torch's groups of gloo and of NCCL share; torch's own stubs do not list them."""

    def allreduce(self, tensors: list[Tensor]) -> Exchange: ...
    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor]) -> Exchange: ...
    def _allgather_base(self, output: Tensor, x: Tensor) -> Exchange: ...
    def send(self, tensors: list[Tensor], to: int, tag: int) -> Exchange: ...
    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Exchange: ...
    def shutdown(self) -> None: ...
    def abort(self) -> None: ...


class Group(Collectives, Protocol):
    """Some of the ranks, numbered from 0, that exchange tensors."""

    def send(self, x: Tensor, to: int) -> Exchange:
        """Begin to send a tensor, which must be kept until `wait` of the exchange returns."""
        ...

    def receive(self, x: Tensor, source: int) -> None:
        """Wait for the next tensor that `source` has sent, and write it into `x`."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Membership:
    """The facts that a rank needs to join a group."""

    name: str
    store: Store
    rank: int
    size: int
    address: str
    """The address of this machine on which the group listens, and on no other."""
    sockets: str | None = None
    """The beginning of the paths of the group's Unix sockets, if all ranks are on this machine."""


class HostGroup:
    """A group that exchanges tensors in the host's memory, by a carrier.

    Sums are made here, in float32 and in pairs, so there is one rounding, and each rank has the same bits.
    """

    exact = True

    def __init__(self, member: Membership) -> None:
        self._rank, self._size = member.rank, member.size
        self._carrier = (
            GlooCarrier(member)
            if member.sockets is None
            else SocketCarrier(member.sockets, member.rank, member.size, TIMEOUT.total_seconds())
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        return add_in_pairs([each.float() for each in self._of_all(x)]).to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._of_all(x), dim=-1)

    def exchange(self, out: Sequence[Tensor], into: Sequence[Tensor]) -> Exchange:
        into[self._rank].copy_(out[self._rank])
        return self._carrier.swap(out, into)

    def _of_all(self, x: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have the shape of this one's."""
        x = x.contiguous()
        everyone = [x if rank == self._rank else torch.empty_like(x) for rank in range(self._size)]
        self._carrier.swap([x] * self._size, everyone).wait()
        return everyone

    def send(self, x: Tensor, to: int) -> Exchange:
        return self._carrier.send(x, to)

    def receive(self, x: Tensor, source: int) -> None:
        self._carrier.receive(x, source)

    def close(self) -> None:
        self._carrier.close()


class GlooCarrier:
    """Carries tensors between machines, by gloo, through TCP that is not encrypted."""

    def __init__(self, member: Membership) -> None:
        self._rank, self._size = member.rank, member.size
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=member.address)]
        options._timeout = TIMEOUT
        store = PrefixStore(member.name, member.store)
        self._gloo = cast("ProcessGroup", dist.ProcessGroupGloo(store, member.rank, member.size, options))

    def send(self, x: Tensor, to: int) -> Exchange:
        return self._gloo.send([x], to, 0)

    def receive(self, x: Tensor, source: int) -> None:
        self._gloo.recv([x], source, 0).wait()

    def close(self) -> None:
        self._gloo.shutdown()

    def swap(self, out: Sequence[Tensor], into: Sequence[Tensor]) -> Exchange:
        others = [rank for rank in range(self._size) if rank != self._rank]
        sent = [self._gloo.send([out[rank]], rank, 0) for rank in others if out[rank].numel()]
        received = [self._gloo.recv([into[rank]], rank, 0) for rank in others if into[rank].numel()]
        return _Several((*received, *sent), keeps=out)


@dataclass(frozen=True, slots=True)
class _Several:
    """Several tensors on their way."""

    transfers: Sequence[Exchange]
    keeps: Sequence[Tensor]
    """The tensors that are sent, which must live as long."""

    def wait(self) -> None:
        for transfer in self.transfers:
            transfer.wait()


class DeviceGroup:
    """Exchanges tensors of CUDA devices by NCCL, also in CUDA graphs. The stream waits, never the host."""

    exact = False  # NCCL adds in an order of its own, and the model's type halves what it carries

    def __init__(self, member: Membership) -> None:
        self._size = member.size
        if member.address == "127.0.0.1":
            os.putenv("NCCL_SOCKET_IFNAME", "lo")  # NCCL takes it from the environment alone
        # Else ranks exchange addresses while they capture, and wait for one whose capture has failed.
        os.putenv("NCCL_GRAPH_REGISTER", "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        store = PrefixStore(member.name, member.store)
        self._nccl = cast("ProcessGroup", dist.ProcessGroupNCCL(store, member.rank, member.size, options))
        self._rehearses = False

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Exchange nothing meanwhile: sums and gathers take the same memory, and mean nothing."""
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if not self._rehearses:
            self._nccl.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        everyone = x.new_empty(self._size, *x.shape)
        x = x.contiguous()
        if not self._rehearses:
            self._nccl._allgather_base(everyone, x).wait()  # pyright: ignore[reportPrivateUsage]
        return torch.cat(everyone.unbind(), dim=-1)

    def exchange(self, out: Sequence[Tensor], into: Sequence[Tensor]) -> Exchange:
        return self._nccl.alltoall(list(into), list(out))

    def send(self, x: Tensor, to: int) -> Exchange:
        return self._nccl.send([x], to, 0)

    def receive(self, x: Tensor, source: int) -> None:
        self._nccl.recv([x], source, 0).wait()

    def close(self) -> None:
        self._nccl.abort()  # an orderly shutdown would need all ranks


@dataclass(frozen=True, slots=True)
class Links:
    """Groups of one rank of each pipeline stage, numbered as the stages are."""

    stream: Group
    """Carries the residual stream from each stage to the next."""
    tokens: Group
    """Carries sampled tokens from the last stage to the first."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups to which one rank belongs; None where it would be alone."""

    world: HostGroup | None = None
    """All ranks, those of replicas that share experts too."""
    tensor: Group | None = None
    """The ranks that share each layer of this stage."""
    links: Links | None = None
    replicas: Group | None = None
    """The ranks of this one's number in all replicas that share experts."""

    @property
    def alone(self) -> bool:
        """Whether no other rank takes part in what this one computes."""
        return self.world is None

    def rehearsing(self) -> AbstractContextManager[None]:
        """Let this rank compute alone: with the memory as ever, and results that mean nothing."""
        return self.tensor.rehearsing() if isinstance(self.tensor, DeviceGroup) else nullcontext()

    def agree(self, number: int) -> bool:
        """Whether all ranks call this with the same number."""
        return self.minimum(number) == -self.minimum(-number)

    def minimum(self, number: int) -> int:
        """The smallest of the numbers with which all ranks call this."""
        if self.world is None:
            return number
        return int(self.world.all_gather(torch.tensor([number])).min())

    def close(self) -> None:
        links = (self.links.stream, self.links.tokens) if self.links else ()
        for group in (self.world, self.tensor, self.replicas, *links):
            if group is not None:
                group.close()


def join_groups(place: Place, open_group: Callable[[Membership], Group], target: torch.device) -> Groups:
    """Find the other ranks. `open_group` makes a group that exchanges tensors of the device `target`."""

    def open_tried(member: Membership) -> Group:
        """A group that has its memory, which NCCL takes with the first call: the cache gets what is left."""
        group = open_group(member)
        group.all_reduce(torch.zeros(1, device=target))
        return group

    world = replicas = tensor = links = None
    if place.expert_replicas > 1:
        size, number = place.expert_replicas, place.replica or 0
        leads = number == place.rank == 0
        member = _members(place, place.expert_rendezvous, size * place.size, leads)
        world = HostGroup(member("world", number * place.size + place.rank, size * place.size))
        replicas = open_tried(member(f"replicas {place.rank}", number, size))
    if place.size == 1:
        return Groups(world, replicas=replicas)
    member = _members(place, place.rendezvous, place.size, place.rank == 0)
    if world is None:
        world = HostGroup(member("world", place.rank, place.size))
    if place.tensor_size > 1:
        tensor = open_tried(member(f"stage {place.stage}", place.tensor_rank, place.tensor_size))
    if place.stages > 1:
        stream, tokens = (
            open_group(member(f"{what} {place.tensor_rank}", place.stage, place.stages))
            for what in ("stream", "tokens")
        )
        links = Links(stream, tokens)
    return Groups(world, tensor, links, replicas)


def _members(place: Place, rendezvous: str, size: int, leads: bool) -> Callable[[str, int, int], Membership]:
    """A function that makes memberships of this rank in groups of the `size` ranks that meet there.

    `leads`: whether it is the first of them.
    """
    store, meeting = _open_store(place, rendezvous, size, leads), urlsplit(rendezvous)

    def member(name: str, rank: int, size: int) -> Membership:
        sockets = f"{meeting.path}-{name}" if meeting.scheme == "file" else None
        return Membership(name, store, rank, size, place.address, sockets)

    return member


def _open_store(place: Place, rendezvous: str, size: int, leads: bool) -> Store:
    """The store through which ranks exchange addresses."""
    where = urlsplit(rendezvous)
    if where.scheme == "file":
        store: Store = FileStore(where.path, size)
    elif where.scheme == "tcp" and where.hostname and where.port:
        store = _tcp_store(where.hostname, where.port, size, place.address if leads else None)
    else:
        raise ValueError(
            f"{rendezvous!r} is not a rendezvous for ranks: write file:///path or tcp://host:port"
        )
    store.set_timeout(TIMEOUT)
    return store


def _tcp_store(host: str, port: int, size: int, own: str | None) -> Store:
    """A store that the first rank holds, whose machine has the address `own`: it listens there alone."""
    listener = None
    if own is not None:
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        listener = socket.create_server((own, port), family=family).detach()
    return TCPStore(
        host,
        port,
        size,
        is_master=own is not None,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def expert_place(config: WorkerConfig) -> ExpertPlace | None:
    """The position of this rank among those that share whole experts, if they do."""
    place = config.place
    if place.expert_size == 1:
        return None
    return ExpertPlace(place.expert_rank, place.expert_size, place.expert_placement, place.expert_transport)


def parallel_of(config: WorkerConfig, groups: Groups) -> Parallel:
    """The position of this rank, as the model's layers see it."""
    place, replicas = config.place, None
    if groups.replicas is not None and place.replica is not None:
        replicas = Replicas(place.replica, place.expert_replicas, groups.replicas)
    return Parallel(
        place.tensor_rank,
        place.tensor_size,
        groups.tensor,
        place.stage,
        place.stages,
        experts=expert_place(config),
        replicas=replicas,
        guesses=config.drafter is not None and config.drafter.embeds,
    )
