"""Options that put replicas and ranks on machines, and what of them contradicts each other."""

import pytest

from server.options.option_parsing import OptionError
from server.options.parse_server_options import from_python, parse
from server.options.server_flags import ServerConfig
from server.run.start_checks import with_ray


def read(*arguments: str, **environ: str) -> ServerConfig:
    return parse(arguments, environ)


def refusal(*arguments: str) -> str:
    with pytest.raises(OptionError) as caught:
        read(*arguments)
    return str(caught.value)


RAY = ["--data-parallel-backend", "ray"]
KEY = ["--cluster-key", "a secret of sixteen characters or more"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "2"], "--nnodes 2 needs a secret that all machines share"),
        (["--nnodes", "2"], "openssl rand -hex 32"),
        (["--nnodes", "2", "--cluster-key", "short"], "--cluster-key: the cluster key has 5 characters"),
        (["--nnodes", "2", "--node-rank", "2", *KEY], "--node-rank 2: of --nnodes 2 the last is 1"),
        (["--nnodes", "2", "--node-rank", "1", *KEY], "--node-rank 1 goes with --headless"),
        (["--nnodes", "2", "--headless", *KEY], "is for --node-rank 1 and up"),
        (["--nnodes", "2", "-dp", "2", *KEY], "use one of them"),
        (["--nnodes", "2", "--master-addr", "1.2.3.4", *KEY], "1.2.3.4 is a public address, and what ranks"),
        (["--nnodes", "2", "--master-addr", "2a01:4f8::1", *KEY], "such as WireGuard's, or --insecure"),
        (["-dp", "2", "--data-parallel-size-local", "1"], "FACET_CLUSTER_KEY"),
        (["-dp", "2", "--data-parallel-size-local", "3"], "has the replicas 0 to 1"),
        (["-dp", "2", "-dpl", "1", "--enable-expert-parallel"], "FACET_CLUSTER_KEY"),
        (["-dp", "2", "-dpl", "1", "-dpa", "1.2.3.4", "--enable-expert-parallel"], "1.2.3.4 is a public"),
        (["-dp", "2", "-dpl", "0", "--enable-expert-parallel"], "runs beside the API: give 1 or more"),
        (["-dp", "2", "-dpl", "1", "-dpp", "1", "--enable-expert-parallel"], "take the port before, too"),
        (["-dp", "2", "--data-parallel-start-rank", "1"], "goes with --headless"),
        (["-dp", "2", "--data-parallel-backend", "mpi"], "'mpi' is not one of mp, ray"),
        ([*RAY], "places replicas, and there is one: give --data-parallel-size"),
        ([*RAY, "-dp", "2", "--headless"], "starts replicas from one server: leave out --headless"),
        ([*RAY, "-dp", "2", "--data-parallel-rank", "1"], "leave out what says that other machines have"),
        ([*RAY, "-dp", "2", "--distributed-executor-backend", "ray"], "the workers of one: leave out one"),
        ([*RAY, "-dp", "2", "--enable-expert-parallel"], "start the machines with --headless"),
        (["-dp", "2", "--data-parallel-external-lb"], "goes with --data-parallel-rank"),
        (["-dp", "2", "--data-parallel-rank", "2"], "of -dp 2 the last is 1"),
        (["-dp", "2", "--data-parallel-rank", "1", "-dph"], "use one of them"),
        (["-dp", "2", "--data-parallel-rank", "1", "--headless"], "leave out --headless"),
        (["-dp", "2", "-dph", "--enable-expert-parallel"], "lets replicas of several servers share experts"),
        (["-dp", "2", "--data-parallel-start-rank", "2", "--data-parallel-size-local", "1"], "--headless"),
        (
            ["-dp", "2", "--headless", "--data-parallel-start-rank", "1", "--data-parallel-size-local", "2"],
            "there are none for --data-parallel-start-rank 1 and --data-parallel-size-local 2",
        ),
        (["-dp", "2", "--headless", "--data-parallel-start-rank", "2", *KEY], "has nothing to run"),
        (["--headless"], "which runs replicas for another machine's API"),
    ],
)
def test_machines_and_replicas_must_make_sense_together(arguments: list[str], message: str) -> None:
    assert message in refusal(*arguments)


def test_a_machine_without_an_api_needs_no_api_process() -> None:
    config = read("--api-server-count", "0", "-dp", "2", "--data-parallel-start-rank", "1", *KEY)
    assert (config.api_server_count, config.headless) == (0, True)


def test_which_replicas_run_here() -> None:
    def replicas(*flags: str) -> tuple[range, bool]:
        found = read(*flags, *KEY).replicas
        return found.local, found.elsewhere

    assert replicas() == (range(1), False)
    assert replicas("-dp", "4") == (range(4), False)
    assert replicas("-dp", "4", "--data-parallel-size-local", "2") == (range(2), True)
    assert replicas("-dp", "4", "--data-parallel-size-local", "0") == (range(0), True)
    away = ("-dp", "4", "--headless", "--data-parallel-start-rank", "2")
    assert replicas(*away) == (range(2, 4), True)
    assert replicas(*away, "--data-parallel-size-local", "1") == (range(2, 3), True)
    assert replicas("-dp", "4", "--data-parallel-rank", "3") == (range(3, 4), False)
    assert replicas("-dp", "4", "-dph", "-dpr", "2", "-dpl", "2") == (range(2, 4), False)
    assert read("--nnodes", "2", "--node-rank", "1", "--headless", *KEY).replicas.size == 1


def test_a_program_is_told_which_of_several_it_is() -> None:
    several = {"VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": "29500"}
    assert from_python({}, {**several, "VLLM_DP_RANK": "1"}).replicas.numbers == range(1, 2)
    with pytest.raises(OptionError, match="data_parallel_rank 2: of data_parallel_size 2 the last is 1"):
        from_python({}, {**several, "VLLM_DP_RANK": "2"})


def test_ranks_meet_at_private_addresses_and_at_names() -> None:
    for private in ("10.0.0.1", "100.64.0.7", "fd00::1", "first.example", "127.0.0.1"):
        read("--nnodes", "2", "--master-addr", private, *KEY)
    read("--nnodes", "2", "--master-addr", "1.2.3.4", "--insecure", *KEY)


def test_where_replicas_of_other_machines_call() -> None:
    layout = read(
        "-dp", "2", "--data-parallel-address", "10.0.0.7", "--data-parallel-rpc-port", "400"
    ).replicas
    first, second = layout.tcp_address(0), layout.tcp_address(1)
    assert (first.requests, first.answers) == ("tcp://10.0.0.7:400", "tcp://10.0.0.7:401")
    assert (second.requests, second.answers) == ("tcp://10.0.0.7:402", "tcp://10.0.0.7:403")
    assert (
        read("--data-parallel-address", "fd00::7").replicas.tcp_address(0).requests == "tcp://[fd00::7]:29550"
    )


def test_replicas_that_ray_places_find_the_server() -> None:
    config = read(*RAY, "-dp", "3", "--data-parallel-size-local", "1", "--data-parallel-address", "10.0.0.1")
    found = with_ray(config).replicas
    assert (list(found.local), list(found.started), found.address) == ([0], [0, 1, 2], "10.0.0.1")
    assert found.secret and found.secret != with_ray(config).replicas.secret, "one of each run"
    own = with_ray(read(*RAY, "-dp", "2", *KEY)).replicas
    assert (own.here, own.secret) == (0, KEY[1])
    assert own.address, "the address of this machine, if none is given"
