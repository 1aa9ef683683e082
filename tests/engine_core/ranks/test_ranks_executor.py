"""Ranks in processes of their own, on this machine, with a worker that has no tensors."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from fake_rank import FELT
from fake_worker import BREAKS_STEP, KILLS_PROCESS, LOSES_DEVICE, VOCAB, facts, reference, text_after
from live import PATIENCE
from msgspec.structs import replace
from sizes import worker_config
from small_steps import follow, read
from toy_language import bound_of

from engine_core.config import EngineConfig, ProcessConfig
from engine_core.executor import ExecutorDead, ReportPhase
from engine_core.ranks.layout import rank_places
from engine_core.ranks.rank_groups import LocalRanks
from engine_core.ranks.ranks_executor import RanksExecutor
from worker.buffers import Buffer
from worker.config import WorkerConfig
from worker.protocol import Encode, NewSeq, Sampling, StepBounds, StepInput

pytestmark = [pytest.mark.usefixtures("support_path")]

Told = list[tuple[str, float, str]]
Make = Callable[..., RanksExecutor]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[RanksExecutor] = []

    def make(told: Told | None = None, **sizes: int) -> RanksExecutor:
        executor = build(worker_config(folder=str(tmp_path)), quiet(told), **sizes)
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.stop()


@pytest.fixture
def started(make: Make) -> Make:
    def begin(**sizes: int) -> RanksExecutor:
        executor = make(**sizes)
        executor.start()
        return executor

    return begin


def build(config: WorkerConfig, report: ReportPhase, **sizes: int) -> RanksExecutor:
    wanted = {f"{name}_parallel_size": size for name, size in sizes.items()}
    places = rank_places(ProcessConfig(engine=EngineConfig(model="", **wanted)))  # pyright: ignore[reportArgumentType]
    groups = [LocalRanks(places, "fake_rank")]
    return RanksExecutor(config, report, places=places, groups=groups, log_level="critical")


def quiet(told: Told | None) -> ReportPhase:
    def tell(stage: str, fraction: float, detail: str = "") -> None:
        if told is not None:
            told.append((stage, fraction, detail))

    return tell


# Nothing goes wrong.


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"tensor": 2, "pipeline": 2}])
def test_every_rank_takes_every_step_and_one_answers(make: Make, sizes: dict[str, int]) -> None:
    executor = make(**sizes)
    assert executor.start() == facts(has_idle_work=True)
    steps = [executor.submit(step) for step in (read(1, [5, 6, 7]), follow(2, 3), follow(3, 4))]
    assert [step.result().tokens[0] for step in steps] == reference([5, 6, 7], 3)


def test_pixels_go_to_the_first_stage_alone(started: Make, tmp_path: Path) -> None:
    executor = started(tensor=2, pipeline=2)
    item = Encode(1, "image", (1, 1, 3), (1, 1, 1), 0, Buffer(b"rgb"))
    steps = [executor.submit(step) for step in (replace(read(1, [5, 6, 7]), encode=[item]), follow(2, 3))]
    assert [step.result().tokens[0] for step in steps] == reference([5, 6, 7], 2)
    executor.stop()  # all ranks have come to the end of their steps
    assert sorted(path.name for path in tmp_path.glob("item-*")) == ["item-0", "item-1"]


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"tensor": 2, "pipeline": 2}])
def test_every_rank_is_told_bounds_which_may_come_behind_later_steps(
    started: Make, sizes: dict[str, int]
) -> None:
    executor = started(**sizes)
    one, other = bound_of([5], VOCAB, "bits"), bound_of([6], VOCAB, "allowed")
    numbered = [read(1, [5, 6, 7]), follow(2, 3), follow(3, 4), follow(4, 5)]
    bound = [replace(step, seqs=[replace(step.seqs[0], bound=step.number % 2 == 1)]) for step in numbered]
    steps = [executor.submit(step) for step in bound]
    executor.bind(StepBounds(1, {0: one}))
    executor.bind(StepBounds(3, {0: other}))
    tokens = [step.result().tokens[0] for step in steps]
    assert tokens[0] == 5 and tokens[2] == 6
    assert tokens[1::2] == [text_after([5, 6, 7, *tokens[:count]]) for count in (1, 3)]


def test_a_rank_that_waits_for_bounds_ends_with_its_engine(started: Make, tmp_path: Path) -> None:
    executor = started(tensor=2)
    [seq] = read(1, [5]).seqs
    executor.submit(replace(read(1, [5]), seqs=[replace(seq, bound=True)]))
    executor.stop()
    assert (tmp_path / "closed-0").exists() and (tmp_path / "closed-1").exists()


def test_each_rank_is_told_its_place(make: Make, tmp_path: Path) -> None:
    make(tensor=2, pipeline=2).start()
    assert [(tmp_path / f"place-{rank}").read_text() for rank in range(4)] == [
        "tensor 0/2 stage 0/2 local 0/4 at 127.0.0.1",
        "tensor 1/2 stage 0/2 local 1/4 at 127.0.0.1",
        "tensor 0/2 stage 1/2 local 2/4 at 127.0.0.1",
        "tensor 1/2 stage 1/2 local 3/4 at 127.0.0.1",
    ]


def test_what_ranks_hold_is_told_as_one_sum(make: Make) -> None:
    executor = make(tensor=2, pipeline=2)
    for number, rank in enumerate(executor._ranks.values()):  # pyright: ignore[reportPrivateUsage]
        rank.facts = replace(facts(num_blocks=number), weight_bytes=10**number, kv_bytes=2 * 10**number)
    told = executor._facts()  # pyright: ignore[reportPrivateUsage]
    assert (told.num_blocks, told.weight_bytes, told.kv_bytes) == (2, 1111, 2222)


def test_progress_is_that_of_the_last_rank(make: Make) -> None:
    told: Told = []
    make(told, tensor=3).start()
    assert told[0][:2] == ("import", 0.0)
    assert told[-1] == ("warmup", 1.0, "")
    order = ["import", "weights", "warmup"]
    advance = [(order.index(stage), fraction) for stage, fraction, _ in told]
    assert advance == sorted(advance)
    assert any("is behind" in detail for _, _, detail in told)


def test_their_rendezvous_goes_with_the_run_whatever_becomes_of_the_engine(tmp_path: Path) -> None:
    """The rendezvous lies in the run's folder, which the engine's parent removes."""
    group = LocalRanks(
        rank_places(ProcessConfig(engine=EngineConfig(model="", tensor_parallel_size=2))),
        "fake_rank",
        str(tmp_path),
    )
    group.start(worker_config(folder=str(tmp_path)), "critical")
    (meeting,) = tmp_path.glob("facet-*")
    assert stat.S_IMODE(meeting.stat().st_mode) == 0o700
    group.stop(by_force=True)
    assert not meeting.exists()


def test_a_step_larger_than_the_pipe_does_not_block_whoever_submits_it(
    started: Make,
) -> None:
    executor = started(tensor=2)
    pids = [process.pid for process in processes(executor)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    large = StepInput(1, [NewSeq(0, [3] * 1_000_000, 1_000_000, Sampling(max_tokens=1))], [])
    step = executor.submit(large)
    assert time.monotonic() - began < 1 * PATIENCE
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert step.result().number == 1


def test_stop_ends_all_ranks_in_order_and_leaves_no_folder(started: Make, tmp_path: Path) -> None:
    executor = started(tensor=2)
    (meeting,) = (group._folder for group in executor._groups)  # pyright: ignore
    assert stat.S_IMODE(os.stat(meeting.name).st_mode) == 0o700
    pids = [process.pid for process in processes(executor)]
    began = time.monotonic()
    executor.stop()
    assert time.monotonic() - began < 2 * PATIENCE
    assert {path.name for path in tmp_path.glob("closed-*")} == {"closed-0", "closed-1"}
    assert not Path(meeting.name).exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(ExecutorDead, match="stopped"):
        executor.submit(read(1, [1]))


def test_ranks_that_hang_are_ended_by_force(started: Make) -> None:
    executor = started(tensor=2)
    for process in processes(executor):
        os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    executor.stop()
    assert time.monotonic() - began < 3 * PATIENCE


# Ranks fail.


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("no-weights", "model.safetensors: tensor 'lm_head.weight' is missing"),
        ("bad-code", "it exited with code 7 and did not say why"),
    ],
)
def test_a_rank_that_dies_while_loading_is_named_with_its_own_error(
    make: Make, tmp_path: Path, file: str, reason: str
) -> None:
    (tmp_path / file).touch()
    executor = make(tensor=2, pipeline=2)
    with pytest.raises(ExecutorDead) as caught:
        executor.start()
    assert (
        str(caught.value) == f"rank 1 (tensor 1 of 2, stage 0 of 2) ended while loading libraries: {reason}"
    )


def test_a_rank_alone_is_called_the_worker(make: Make, tmp_path: Path) -> None:
    (tmp_path / "no-weights").touch()
    with pytest.raises(
        ExecutorDead, match=r"^the worker ended while loading libraries: model\.safetensors: "
    ):
        make().start()


def test_a_killed_rank_is_named_though_others_complain_first(started: Make) -> None:
    executor = started(tensor=2)
    began = time.monotonic()
    with pytest.raises(ExecutorDead) as caught:
        executor.submit(read(1, [KILLS_PROCESS])).result()
    assert str(caught.value) == (
        "rank 1 (tensor 1 of 2, stage 0 of 1) ended while serving: "
        "it was ended by SIGKILL, most likely because memory ran out (`dmesg` tells)"
    )
    executor.stop()
    assert time.monotonic() - began < 1 * PATIENCE, "what is left is not waited for"


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_prepare_in_the_order_of_steps(started: Make, ranks: int) -> None:
    executor = started(tensor=ranks)
    assert executor.idle(wait=True)
    assert executor.idle()
    step = executor.submit(read(1, [5]))
    assert step.result().tokens == reference([5], 1)
    assert executor.idle(wait=True)
    assert not executor.idle(wait=True), "each has three things to prepare"


def test_the_first_of_several_that_fail_is_named(started: Make) -> None:
    executor = started(tensor=2)
    step = executor.submit(read(1, [LOSES_DEVICE]))
    for process in processes(executor):
        assert process.ended_within(5)
    with pytest.raises(ExecutorDead, match=r"rank 1 .*AcceleratorError: an illegal memory access") as caught:
        step.result()
    assert FELT not in str(caught.value)


def test_a_rank_that_dies_while_nothing_runs_wakes_a_poll(started: Make) -> None:
    executor = started(tensor=2)
    poller = zmq.Poller()
    executor.register(poller)
    assert not poller.poll(0)
    executor.check()
    os.kill(processes(executor)[1].pid, signal.SIGTERM)
    assert poller.poll(5000)
    with pytest.raises(ExecutorDead, match=r"rank 1 .*ended while serving: it was ended by SIGTERM"):
        executor.check()
    with pytest.raises(ExecutorDead, match="rank 1"):
        executor.submit(read(1, [1]))


def test_a_step_that_breaks_a_lonely_rank_is_the_end_of_that_step_only(
    started: Make,
) -> None:
    executor = started()
    with pytest.raises(RuntimeError, match="odd input"):
        executor.submit(read(1, [BREAKS_STEP])).result()
    assert executor.submit(read(2, [5])).result().tokens == reference([5], 1)
    with pytest.raises(ExecutorDead, match=r"the worker ended while serving: AcceleratorError"):
        executor.submit(read(3, [LOSES_DEVICE])).result()


def test_a_step_that_breaks_one_of_several_ranks_is_the_end_of_all(
    started: Make,
) -> None:
    executor = started(tensor=2)
    with pytest.raises(ExecutorDead, match=r"rank 1 .*: RuntimeError: odd input"):
        executor.submit(read(1, [BREAKS_STEP])).result()


def processes(executor: RanksExecutor) -> list:
    (group,) = executor._groups  # pyright: ignore[reportPrivateUsage]
    return list(group._processes.values())  # pyright: ignore
