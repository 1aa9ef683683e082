"""The ranks that hold one model together: how they find each other, and how tensors travel between them.

Every purpose has a group of its own. NCCL does what it is asked on a group one thing after the other, so
tokens that go back must not stand in line with the streams that go forward.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from typing import Protocol, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from models.parallel.parallel import Collectives
from worker.config import Place

TIMEOUT = timedelta(minutes=10)
"""So long a rank waits for another one. Between steps nobody waits, and a dead rank is seen at once."""


class Pending(Protocol):
    """A tensor on its way; it must be kept until it has arrived."""

    def wait(self) -> object: ...


class Carrier(Protocol):
    """What gloo's groups and NCCL's have in common, which torch's own stubs do not say."""

    def allreduce(self, tensors: list[Tensor]) -> Pending: ...
    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor]) -> Pending: ...
    def send(self, tensors: list[Tensor], to: int, tag: int) -> Pending: ...
    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Pending: ...
    def shutdown(self) -> None: ...
    def abort(self) -> None: ...


class Group(Collectives, Protocol):
    """Some ranks, which number themselves from 0."""

    def send(self, x: Tensor, to: int) -> Pending: ...

    def receive(self, x: Tensor, source: int) -> None:
        """Into `x`, in the order in which they were sent."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Membership:
    """What a rank must know to join a group."""

    name: str
    store: Store
    rank: int
    size: int
    address: str
    """Of this machine. Nothing listens on any other."""


class HostGroup:
    """Tensors in the host's memory, by gloo.

    gloo only carries them. Sums are made here, in float32 and in the order of the ranks: so there is one
    rounding, and each rank has the same bits. For what a decoding step sends it is three times as fast, too.
    """

    def __init__(self, member: Membership) -> None:
        self._rank, self._size = member.rank, member.size
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=member.address)]
        options._timeout = TIMEOUT
        store = PrefixStore(member.name, member.store)
        self._gloo = cast("Carrier", dist.ProcessGroupGloo(store, member.rank, member.size, options))

    def all_reduce(self, x: Tensor) -> Tensor:
        return reduce(torch.add, (each.float() for each in self._exchange(x))).to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def send(self, x: Tensor, to: int) -> Pending:
        return self._gloo.send([x], to, 0)

    def receive(self, x: Tensor, source: int) -> None:
        self._gloo.recv([x], source, 0).wait()

    def close(self) -> None:
        self._gloo.shutdown()

    def _exchange(self, x: Tensor) -> list[Tensor]:
        """The tensors of all ranks."""
        x = x.contiguous()
        others = [rank for rank in range(self._size) if rank != self._rank]
        everyone = [x if rank == self._rank else torch.empty_like(x) for rank in range(self._size)]
        sent = [self._gloo.send([x], rank, 0) for rank in others]
        received = [self._gloo.recv([everyone[rank]], rank, 0) for rank in others]
        for work in (*received, *sent):
            work.wait()
        return everyone


class DeviceGroup:
    """Tensors in the memory of CUDA devices, by NCCL. The device's stream waits for them, never the host."""

    def __init__(self, member: Membership) -> None:
        self._size = member.size
        if member.address == "127.0.0.1":
            os.putenv("NCCL_SOCKET_IFNAME", "lo")  # NCCL can be told in no other way
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        store = PrefixStore(member.name, member.store)
        self._nccl = cast("Carrier", dist.ProcessGroupNCCL(store, member.rank, member.size, options))

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._nccl.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        everyone = [torch.empty_like(x) for _ in range(self._size)]
        self._nccl.allgather([everyone], [x.contiguous()]).wait()
        return torch.cat(everyone, dim=-1)

    def send(self, x: Tensor, to: int) -> Pending:
        return self._nccl.send([x], to, 0)

    def receive(self, x: Tensor, source: int) -> None:
        self._nccl.recv([x], source, 0).wait()

    def close(self) -> None:
        self._nccl.abort()  # to shut it down in order, all ranks would have to come


@dataclass(frozen=True, slots=True)
class Links:
    """Between one rank of each stage, numbered as the stages are."""

    stream: Group
    """From each stage to the next."""
    tokens: Group
    """From the last to the first."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Those of one rank; None where it would be alone."""

    everyone: HostGroup | None = None
    tensor: Group | None = None
    """The ranks that share each layer of this stage."""
    links: Links | None = None

    def least(self, number: int) -> int:
        """Of the numbers that all ranks have."""
        if self.everyone is None:
            return number
        return int(self.everyone.all_gather(torch.tensor([number])).min())

    def close(self) -> None:
        links = (self.links.stream, self.links.tokens) if self.links else ()
        for group in (self.everyone, self.tensor, *links):
            if group is not None:
                group.close()


def meet(place: Place, open_group: Callable[[Membership], Group], target: torch.device) -> Groups:
    """Find the other ranks. `open_group`: for tensors that lie where the device `target` has them."""
    if place.size == 1:
        return Groups()
    store = _meeting_point(place)

    def member(name: str, rank: int, size: int) -> Membership:
        return Membership(name, store, rank, size, place.address)

    everyone = HostGroup(member("everyone", place.rank, place.size))
    tensor, links = None, None
    if place.tensor_size > 1:
        tensor = open_group(member(f"stage {place.stage}", place.tensor_rank, place.tensor_size))
        # NCCL takes its memory with the first call: now, before the cache gets what is left.
        tensor.all_reduce(torch.zeros(1, device=target))
    if place.stages > 1:
        stream, tokens = (
            open_group(member(f"{what} {place.tensor_rank}", place.stage, place.stages))
            for what in ("stream", "tokens")
        )
        links = Links(stream, tokens)
    return Groups(everyone, tensor, links)


def _meeting_point(place: Place) -> Store:
    where = urlsplit(place.meeting)
    if where.scheme == "file":
        store: Store = FileStore(where.path, place.size)
    elif where.scheme == "tcp" and where.hostname and where.port:
        store = _common_store(where.hostname, where.port, place)
    else:
        raise ValueError(f"{place.meeting!r} is no place to meet: write file:///path or tcp://host:port")
    store.set_timeout(TIMEOUT)
    return store


def _common_store(host: str, port: int, place: Place) -> Store:
    """Rank 0 holds it, and listens where the others reach its machine and nowhere else."""
    listener = None
    if place.rank == 0:
        family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
        listener = socket.create_server((place.address, port), family=family).detach()
    return TCPStore(
        host,
        port,
        place.size,
        is_master=place.rank == 0,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
