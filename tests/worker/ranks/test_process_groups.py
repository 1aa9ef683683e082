"""Ranks find each other and exchange tensors: here they are threads, with real sockets between them."""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import torch
import torch.distributed as dist
from ranks import Layout
from recorded_nccl import RecordedNccl
from torch import Tensor

from worker.config import Place
from worker.devices.cpu import Cpu
from worker.ranks.process_groups import DeviceGroup, Group, Groups, join_groups

Result = TypeVar("Result")


def join(places: Sequence[Place]) -> list[Groups]:
    return at_once(lambda place: join_groups(place, Cpu(1).open_group, Cpu.target), places)


def at_once(run: Callable[..., Result], *of_each: Sequence[object]) -> list[Result]:
    with ThreadPoolExecutor(len(of_each[0])) as pool:
        return list(pool.map(run, *of_each))


def places(folder: Path, tensor: int, stages: int = 1) -> list[Place]:
    return Layout(tensor, stages).places(f"file://{folder}/rendezvous")


def tensor_group(groups: Groups) -> Group:
    assert groups.tensor is not None
    return groups.tensor


def listening() -> set[str]:
    """The addresses on which this process listens."""
    inodes = {
        link.readlink().name.removeprefix("socket:[").rstrip("]")
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink()
    }
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows6 = [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    mine = [row for row in rows if row[3] == "0A" and row[9] in inodes]
    assert not [row for row in rows6 if row[3] == "0A" and row[9] in inodes]
    words = [int(row[1].split(":")[0], 16) for row in mine]
    return {str(IPv4Address(word.to_bytes(4, "little"))) for word in words}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_the_same_bits_everywhere(tmp_path: Path, dtype: torch.dtype) -> None:
    groups = join(places(tmp_path, 3))
    pieces = [torch.randn(5, 7, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(3)]
    before = [piece.clone() for piece in pieces]
    sums = at_once(lambda own, piece: tensor_group(own).all_reduce(piece), groups, pieces)
    wide = pieces[0].float() + pieces[1].float() + pieces[2].float()
    for rank, total in enumerate(sums):
        assert torch.equal(total, wide.to(dtype)), "rounded once"
        assert torch.equal(pieces[rank], before[rank])
    close(groups)


def test_neighbours_are_added_first(tmp_path: Path) -> None:
    """A sum in the order of the ranks would be 1: of 2^25 + 1 the 1 is lost."""
    groups = join(places(tmp_path, 4))
    pieces = [torch.tensor([value]) for value in (2.0**25, 1.0, -(2.0**25), 1.0)]
    sums = at_once(lambda own, piece: tensor_group(own).all_reduce(piece), groups, pieces)
    assert [total.item() for total in sums] == [0.0] * 4
    close(groups)


def test_pieces_lie_side_by_side_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    groups = join(places(tmp_path, 3))
    pieces = [torch.full((2, 2), rank) for rank in range(3)]

    def gather(own: Groups, piece: Tensor) -> list[list[int]]:
        return tensor_group(own).all_gather(piece.t()).tolist()  # which need not be contiguous

    assert at_once(gather, groups, pieces) == [[[0, 0, 1, 1, 2, 2]] * 2] * 3
    close(groups)


def test_minimum_of_all_ranks(tmp_path: Path) -> None:
    groups = join(places(tmp_path, 2, 2))
    assert at_once(lambda own, number: own.minimum(number), groups, [7, 5, 1 << 40, 6]) == [5] * 4
    close(groups)


def test_agreement_of_all_ranks(tmp_path: Path) -> None:
    groups = join(places(tmp_path, 3))
    assert at_once(lambda own, number: own.agree(number), groups, [7, 7, 7]) == [True] * 3
    assert at_once(lambda own, number: own.agree(number), groups, [7, 9, 7]) == [False] * 3
    close(groups)


def test_alone() -> None:
    groups = join_groups(Place(), Cpu(1).open_group, Cpu.target)
    assert groups == Groups()
    assert groups.alone
    assert groups.minimum(3) == 3
    assert groups.agree(3)
    with groups.rehearsing():
        assert groups.minimum(3) == 3
    groups.close()


def test_a_rehearsal_exchanges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results have their shapes, and nobody waits. Here the host's exchanges take the place of NCCL's."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", RecordedNccl, raising=False)
    groups = at_once(lambda place: join_groups(place, DeviceGroup, torch.device("cpu")), places(tmp_path, 2))
    first, second = (tensor_group(own) for own in groups)
    with groups[0].rehearsing():
        assert not groups[0].alone
        assert first.all_reduce(torch.ones(2, 3)).shape == (2, 3)
        assert first.all_gather(torch.ones(2, 3)).shape == (2, 6)
    sums = at_once(lambda group: group.all_reduce(torch.ones(2)).tolist(), [first, second])
    assert sums == [[2.0, 2.0]] * 2
    pieces = at_once(
        lambda group, piece: group.all_gather(torch.full((2, 2), piece).t()).tolist(), [first, second], [3, 4]
    )
    assert pieces == [[[3, 3, 4, 4]] * 2] * 2
    close(groups)


def test_stages_send_without_waiting(tmp_path: Path) -> None:
    groups = join(places(tmp_path, 1, 3))
    first, second, third = (own.links.stream for own in groups if own.links)
    sent = [first.send(torch.full((3,), number), 1) for number in range(4)]
    for number in range(4):
        x = torch.empty(3, dtype=torch.int64)
        second.receive(x, 0)
        assert x.tolist() == [number] * 3
    for pending in sent:
        pending.wait()
    on_its_way = second.send(torch.ones(1), 2)
    x = torch.zeros(1)
    third.receive(x, 1)
    assert x.item() == 1
    on_its_way.wait()
    close(groups)


def test_ranks_of_one_machine_open_no_port(tmp_path: Path) -> None:
    groups = join(places(tmp_path, 2, 2))
    assert listening() == set()
    close(groups)


def test_two_machines_meet_at_an_address(tmp_path: Path) -> None:
    """Two addresses of this machine play them. Each listens on its own, and on no other."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    everyone = Layout(2).places(f"tcp://127.0.0.2:{port}")
    machines = [
        msgspec.structs.replace(place, address=f"127.0.0.{2 + place.rank}", local_rank=0, local_ranks=1)
        for place in everyone
    ]
    groups = join(machines)
    assert at_once(lambda own: own.minimum(4), groups) == [4, 4]
    assert listening() == {"127.0.0.2", "127.0.0.3"}
    close(groups)


def test_a_lost_rank_is_noticed_at_once(tmp_path: Path) -> None:
    groups = join(places(tmp_path, 2))
    lost = groups.pop()
    lost.close()
    del lost
    with pytest.raises(RuntimeError):
        tensor_group(groups[0]).all_reduce(torch.ones(1))
    close(groups)


def test_a_rendezvous_is_needed() -> None:
    place = Place(tensor_size=2, rendezvous="http://somewhere")
    with pytest.raises(
        ValueError, match="'http://somewhere' is not a rendezvous for ranks: write file:///path"
    ):
        join_groups(place, Cpu(1).open_group, Cpu.target)


def close(groups: list[Groups]) -> None:
    for own in groups:
        own.close()
