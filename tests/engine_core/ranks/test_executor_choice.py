"""The ranks and machines that follow from options, and options that cannot be met."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace
from sizes import worker_config
from tiny import tiny_checkpoint

from engine_core.config import EngineConfig, ProcessConfig, Replicas
from engine_core.engine import Engine
from engine_core.executor import Executor, InlineExecutor, ReportPhase
from engine_core.ranks.joint_executor import JointExecutor
from engine_core.ranks.layout import backend_of, check_layout, rank_places
from engine_core.ranks.ranks_executor import RanksExecutor, make_executor
from models.config import read_config
from worker.config import Place, WorkerConfig

KEY = "0123456789abcdef"


def asked(tensor: int = 1, pipeline: int = 1, **more: object) -> EngineConfig:
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    return EngineConfig(model="", **sizes, **more)  # pyright: ignore[reportArgumentType]


def process(config: EngineConfig, **more: object) -> ProcessConfig:
    return ProcessConfig(engine=config, **more)  # pyright: ignore[reportArgumentType]


def places_of(config: EngineConfig, **more: object) -> list[Place]:
    return rank_places(process(config, **more))


def beside(index: int, count: int, **more: object) -> dict[str, object]:
    """What the process of one of several replicas on this machine is told of them."""
    return {"index": index, "replicas": Replicas(size=count, here=count, **more)}  # pyright: ignore


@pytest.mark.parametrize(
    ("config", "backend"),
    [
        (asked(), "uni"),
        (asked(2), "mp"),
        (asked(1, 2), "mp"),
        (asked(distributed_executor_backend="mp"), "mp"),
        (asked(distributed_executor_backend="uni"), "uni"),
        (asked(2, distributed_executor_backend="ray"), "ray"),
        (asked(2, nnodes=2, cluster_key=KEY), "mp"),
    ],
)
def test_one_worker_is_inline_and_more_are_processes(config: EngineConfig, backend: str) -> None:
    assert backend_of(process(config)) == backend


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (asked(2, 2, distributed_executor_backend="uni"), "uni is one worker .* makes 4: leave it out"),
        (asked(distributed_executor_backend="threads"), "'threads'; it can be uni, mp or ray"),
        (asked(2, nnodes=2, distributed_executor_backend="ray"), "goes with .* mp, and not with ray"),
        (asked(3, nnodes=2, cluster_key=KEY), "makes 3 workers, which cannot be divided evenly"),
        (asked(2, nnodes=2, node_rank=2, cluster_key=KEY), "--node-rank 2: .* it can be 0 to 1"),
        (asked(2, nnodes=2), "FACET_CLUSTER_KEY"),
        (asked(2, nnodes=2), "openssl rand -hex 32"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(config: EngineConfig, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_executor(process(config))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (asked(3), "--tensor-parallel-size 3: 8 attention heads cannot be .*; choose a size that divides 8"),
        (asked(2, 50), "--pipeline-parallel-size 50: there are . layers, .*; choose . or less"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_a_process_is_started(config: EngineConfig, reason: str) -> None:
    def start(worker: WorkerConfig, report: ReportPhase) -> Executor:
        pytest.fail("is asked for ranks")

    with pytest.raises(ValueError, match=reason):
        Engine.start(replace(config, model="demo"), lambda _: None, start)


def test_a_replica_over_machines_is_alone_on_each() -> None:
    with pytest.raises(ValueError, match="2 are to start here: start one `serve` for each"):
        make_executor(process(asked(2, nnodes=2, cluster_key=KEY), **beside(0, 2)))


def test_ranks_of_a_stage_lie_side_by_side_and_machines_have_equally_many() -> None:
    config = asked(2, 2, nnodes=2, master_addr="10.0.0.1", master_port=5000, cluster_key=KEY)
    places = places_of(config)
    assert [(place.rank, place.tensor_rank, place.stage, place.local_rank) for place in places] == [
        (0, 0, 0, 0),
        (1, 1, 0, 1),
        (2, 0, 1, 0),
        (3, 1, 1, 1),
    ]
    assert {place.rendezvous for place in places} == {"tcp://10.0.0.1:5001"}
    assert {place.local_ranks for place in places} == {2}


def test_replicas_share_the_devices_of_their_machine() -> None:
    first, second = (places_of(asked(2), **beside(index, 2)) for index in (0, 1))
    assert [place.local_rank for place in first + second] == [0, 1, 2, 3]
    assert {place.local_ranks for place in first + second} == {4}
    assert {place.rendezvous for place in first + second} == {""}, "each finds its own, on this machine"


def test_a_worker_in_the_engines_process_knows_its_neighbours() -> None:
    executor = make_executor(process(asked(), **beside(1, 3)))(worker_config(), quiet)
    assert isinstance(executor, InlineExecutor)
    place = executor._config.place  # pyright: ignore[reportPrivateUsage]
    assert place == replace(Place(), local_rank=1, local_ranks=3, replica=1)


def test_more_workers_are_a_ranks_executor() -> None:
    assert isinstance(make_executor(process(asked(2)))(worker_config(), quiet), RanksExecutor)


def test_workers_are_called_by_their_replica_if_there_are_several() -> None:
    assert [place.name for place in places_of(asked(2))] == ["rank 0", "rank 1"]
    assert [place.name for place in places_of(asked(2), **beside(3, 4))] == [
        "engine 3 rank 0",
        "engine 3 rank 1",
    ]
    assert [place.name for place in places_of(asked(), **beside(1, 2))] == ["engine 1 worker"]
    assert Place().name == "worker"


def quiet(stage: str, fraction: float, detail: str = "") -> None:
    pass


def test_whole_experts_are_shared_by_the_ranks_of_a_stage() -> None:
    def shares(config: EngineConfig) -> list[tuple[int, int, str]]:
        return [(place.expert_rank, place.expert_size, place.expert_placement) for place in places_of(config)]

    assert shares(asked(2, 2)) == [(0, 1, "linear")] * 4
    whole = asked(2, 2, enable_expert_parallel=True, expert_placement_strategy="round_robin")
    assert shares(whole) == [(0, 2, "round_robin"), (1, 2, "round_robin")] * 2


def test_the_exchange_of_tokens_reaches_every_rank() -> None:
    def exchanges(**given: object) -> set[str]:
        config = asked(2, enable_expert_parallel=True, **given)
        return {place.expert_transport for place in places_of(config)}

    assert exchanges() == {"allgather_reducescatter"}
    assert exchanges(all2all_backend="all_to_all") == {"all_to_all"}


def test_whole_experts_are_shared_by_the_ranks_of_a_stage_in_all_replicas(tmp_path: Path) -> None:
    sharing = asked(2, 2, enable_expert_parallel=True)

    def build(index: int) -> list[Place]:
        more = beside(index, 3, together=True)
        one = process(sharing, **more, generation=4, folder=str(tmp_path))
        executor = make_executor(one)(worker_config(), quiet)
        assert isinstance(executor, JointExecutor)
        ranks = executor._inner  # pyright: ignore[reportPrivateUsage]
        assert isinstance(ranks, RanksExecutor)
        executor.stop()
        return [rank.place for rank in ranks._ranks.values()]  # pyright: ignore[reportPrivateUsage]

    with ThreadPoolExecutor() as pool:  # they meet
        places = [place for found in pool.map(build, range(3)) for place in found]
    assert [place.expert_rank for place in places] == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]
    assert {(place.expert_size, place.expert_replicas) for place in places} == {(6, 3)}
    assert {place.expert_rendezvous for place in places} == {f"file://{tmp_path}/experts-4/m"}
    assert stat.S_IMODE((tmp_path / "experts-4").stat().st_mode) == 0o700
    assert [place.local_rank for place in places] == list(range(12))
    alone = places_of(asked(2), **beside(1, 2))
    assert {(place.expert_rank, place.expert_size, place.expert_replicas) for place in alone} == {(0, 1, 1)}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (asked(distributed_executor_backend="uni"), "uni: replicas that share experts .* or choose mp"),
        (asked(2, distributed_executor_backend="ray"), "ray: replicas that share experts .* or choose mp"),
        (asked(2, nnodes=2, cluster_key=KEY), "--nnodes 2 spreads one replica over machines"),
    ],
)
def test_replicas_that_share_experts_have_processes_of_one_machine(config: EngineConfig, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_executor(process(config, **beside(0, 2, together=True)))


def test_experts_are_divided_by_all_ranks_of_all_replicas(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = read_config(tiny_checkpoint("Qwen3MoeForCausalLM", tmp_path, num_experts=8))
    check_layout(asked(2, enable_expert_parallel=True), model, expert_replicas=4)
    check_layout(asked(enable_expert_parallel=True), model, expert_replicas=2)
    assert not caplog.records
    with pytest.raises(ValueError) as refused:
        check_layout(asked(2, enable_expert_parallel=True), model, expert_replicas=3)
    assert str(refused.value) == (
        "--enable-expert-parallel: 8 experts cannot be divided evenly among 6 ranks, which "
        "--tensor-parallel-size 2 times --data-parallel-size 3 makes; choose sizes whose product divides 8, "
        "or leave the option out, and each replica holds all experts"
    )
    dense = read_config(tiny_checkpoint("LlamaForCausalLM", tmp_path / "dense"))
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts; leave the option out"):
        check_layout(asked(enable_expert_parallel=True), dense, expert_replicas=2)


def test_layouts_of_experts_that_cannot_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = read_config(tiny_checkpoint("Qwen3MoeForCausalLM", tmp_path))
    with pytest.raises(
        ValueError, match="7 experts cannot be divided evenly among 2 ranks; leave the option"
    ):
        check_layout(asked(2, enable_expert_parallel=True), model)
    with pytest.raises(ValueError, match="round_robin goes with --enable-expert-parallel: add that"):
        check_layout(asked(expert_placement_strategy="round_robin"), model)
    with pytest.raises(ValueError, match="--all2all-backend all_to_all goes with --enable-expert-parallel"):
        check_layout(asked(2, all2all_backend="all_to_all"), model)
    with pytest.raises(ValueError, match="--all2all-backend is 'pplx'; it can be allgather_reducescatter or"):
        check_layout(asked(enable_expert_parallel=True, all2all_backend="pplx"), model)
    with pytest.raises(ValueError, match="is 'even'; it can be linear or round_robin"):
        check_layout(asked(enable_expert_parallel=True, expert_placement_strategy="even"), model)
    assert not caplog.records
    check_layout(asked(enable_expert_parallel=True), model)
    assert "--enable-expert-parallel does nothing" in caplog.text
