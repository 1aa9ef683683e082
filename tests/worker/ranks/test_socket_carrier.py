"""Unix sockets carry tensors of any size, in order, both ways at once; a lost rank is an error at once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from worker.ranks.socket_carrier import SocketCarrier
from worker.ranks.unix_sockets import RankLostError

LARGE = 3_000_001
"""More bytes than a socket holds on their way."""


def carriers(folder: Path, size: int, timeout: float = 30) -> list[SocketCarrier]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: SocketCarrier(f"{folder}/ranks", rank, size, timeout), range(size)))


def close(all_of_them: list[SocketCarrier]) -> None:
    for carrier in all_of_them:
        carrier.close()


def share(carrier: SocketCarrier, rank: int, piece: torch.Tensor, size: int = 3) -> list[torch.Tensor]:
    """Give all ranks the same tensor; returns those of all."""
    everyone = [piece if other == rank else torch.empty_like(piece) for other in range(size)]
    carrier.swap([piece] * size, everyone).wait()
    return everyone


@pytest.mark.parametrize("count", [0, 1, 1000, LARGE])
def test_each_rank_gets_what_each_has(tmp_path: Path, count: int) -> None:
    ranks = carriers(tmp_path, 3)
    pieces = [torch.full((count,), rank, dtype=torch.bfloat16) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for everyone in pool.map(share, ranks, range(len(ranks)), pieces):
            assert all(torch.equal(got, piece) for got, piece in zip(everyone, pieces, strict=True))
    close(ranks)


def test_what_does_not_fit_on_its_way_is_waited_for_by_nobody_and_stays_in_order(tmp_path: Path) -> None:
    first, second = carriers(tmp_path, 2)
    sizes = (3, LARGE, 0, 5, LARGE)
    sent = [first.send(torch.full((size,), number), 1) for number, size in enumerate(sizes)]
    assert not sent[-1].done
    for number, size in enumerate(sizes):
        got = torch.empty(size, dtype=torch.int64)
        second.receive(got, 0)
        assert torch.equal(got, torch.full((size,), number))
    for sending in sent:
        sending.wait()
    close([first, second])


def test_an_exchange_comes_after_what_was_sent_before(tmp_path: Path) -> None:
    first, second = carriers(tmp_path, 2)
    first.send(torch.ones(LARGE), 1)

    def receive() -> list[torch.Tensor]:
        second.receive(torch.empty(LARGE), 0)
        return share(second, 1, torch.tensor([7]), 2)

    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(receive)
        assert [x.item() for x in share(first, 0, torch.tensor([5]), 2)] == [5, 7]
        assert [x.item() for x in theirs.result()] == [5, 7]
    close([first, second])


def test_swaps_of_unequal_pieces_may_be_awaited_later(tmp_path: Path) -> None:
    """Several are under way, and are finished in their order whoever waits first."""
    ranks = carriers(tmp_path, 2)
    sizes = ((LARGE, 3), (0, LARGE), (2, 0))  # what the first sends the second, and back

    def swap(rank: int) -> list[torch.Tensor]:
        other = 1 - rank
        came, waiting = [], []
        for number, counts in enumerate(sizes):
            out, into = [torch.empty(0)] * 2, [torch.empty(0)] * 2
            out[other] = torch.full((counts[rank],), 10.0 * number + rank)
            into[other] = torch.empty(counts[other])
            waiting.append(ranks[rank].swap(out, into))
            came.append(into[other])
        for each in (waiting[1], waiting[0], waiting[2]):
            each.wait()
        return came

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(swap, range(2)))
    for rank, came in enumerate(results):
        for number, (x, counts) in enumerate(zip(came, sizes, strict=True)):
            assert torch.equal(x, torch.full((counts[1 - rank],), 10.0 * number + 1 - rank))
    close(ranks)


def test_a_rank_that_ends_is_named_by_those_who_wait_for_it(tmp_path: Path) -> None:
    first, second = carriers(tmp_path, 2)
    threading.Timer(0.05, second.close).start()
    with pytest.raises(RankLostError, match="rank 1 of the same group has ended"):
        first.receive(torch.empty(1), 1)
    first.close()


def test_what_is_on_its_way_to_a_rank_that_ends_fails(tmp_path: Path) -> None:
    first, second = carriers(tmp_path, 2)
    sending = first.send(torch.ones(LARGE), 1)
    second.close()
    with pytest.raises(RankLostError, match="rank 1 of the same group has ended"):
        sending.wait()
    first.close()


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    for rank in (0, 1):
        with pytest.raises(RankLostError, match="not come"):
            SocketCarrier(f"{tmp_path}/ranks{rank}", rank, 2, timeout=0.05)


def test_a_rank_that_stands_still(tmp_path: Path) -> None:
    ranks = carriers(tmp_path, 2, timeout=2)
    with pytest.raises(RankLostError, match=r"rank 0 has waited 2 s for 1"):
        ranks[0].receive(torch.empty(1), 1)
    close(ranks)
