"""One model over two ranks, each a process of its own: the command as a user starts it."""

import os
import signal
from pathlib import Path

from live import SMALL, LiveServer, alive, complete, serving, starting, wait_until

TWO = ("demo", *SMALL, "--tensor-parallel-size", "2")
ASK = "The capital of France is"


def test_two_ranks_serve_as_one_and_the_loss_of_one_is_named(demo: LiveServer) -> None:
    with serving(*TWO) as server:
        ranks = server.rank_pids()
        assert len(ranks) == 2
        assert complete(server, ASK) == complete(demo, ASK)
        assert server.listening() == {("127.0.0.1", server.port)}, "ranks of one machine open no port"
        os.kill(ranks[1], signal.SIGKILL)
        reason = "rank 1 (tensor 1 of 2, stage 0 of 1) ended while serving: it was ended by SIGKILL"
        wait_until(lambda: reason in server.output(), 20, server.output)
        wait_until(lambda: not any(map(alive, ranks)), 20)
        assert complete(server, ASK) == complete(demo, ASK), "others are started in their place"


def test_a_start_that_is_ended_leaves_nothing_behind(short_path: Path) -> None:
    with starting(*TWO, env={"TMPDIR": str(short_path)}) as server:
        wait_until(lambda: any(short_path.glob("facet-*/facet-*")), 20, server.output)
        children = server.children()
        assert server.terminate(10) == 0, server.output()
        assert list(short_path.iterdir()) == []
        wait_until(lambda: not any(map(alive, children)), 2)
