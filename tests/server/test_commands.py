"""The command: its exit codes, its port, its messages. Whole runs of servers are in tests/e2e."""

import io
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from server.options.parse_server_options import parse
from server.run.commands import (
    BAD_USAGE,
    FAILED,
    INTERRUPTED,
    PORT_IN_USE,
    TERMINAL,
    bind,
    is_open_to_others,
    shows_key,
)
from server.terminal.progress_bar import ProgressDisplay

COMMAND = [sys.executable, "-c", "from server.main import main; main()"]


def run(*words: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **variables}
    return subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=cwd, env=env)


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(*COMMAND, *arguments, cwd=None, **variables)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "--zzqq"], "error: there is no option --zzqq"),
        (
            ["serve", "--ssl-keyfile", "/no/k", "--ssl-certfile", "/no/c"],
            "error: --ssl-keyfile: there is no file /no/k",
        ),
        (["server"], "error: there is no command server; did you mean serve?\n"),
        (["zzqq"], "error: there is no command zzqq; facet --help lists all\n"),
        ([], "usage: facet COMMAND"),
    ],
)
def test_bad_usage_is_refused_in_one_line(arguments: list[str], expected: str) -> None:
    done = command(*arguments)
    assert done.returncode == BAD_USAGE
    assert done.stderr.startswith(expected)
    assert "Traceback" not in done.stderr


def test_ctrl_c_before_a_command_has_begun_is_no_traceback() -> None:
    code = (
        "from server import main\n"
        "from server.run import commands\n"
        "def read(*_, **__): raise KeyboardInterrupt\n"
        "commands.read = read\n"
        "main.main()"
    )
    done = run(sys.executable, "-c", code, "serve")
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has it")
@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["--version"]])
def test_output_that_cannot_be_written_is_told_in_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (FAILED, "error: [Errno 28] No space left on device\n")


def test_output_that_nobody_reads_is_no_error_to_tell() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        done = subprocess.run(
            [*COMMAND, "--help"], stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (FAILED, "")


def test_help_names_every_command() -> None:
    said = command("--help").stdout
    words = said.replace("|", " ").split()
    assert [name for name in ("serve", "bench", *TERMINAL) if name not in words] == []


@pytest.mark.turns
@pytest.mark.parametrize("module", ["server.main", "server.run.api_lifecycle", "facet"])
def test_modules_that_may_be_run_do_what_the_command_does(module: str) -> None:
    arguments = ["serve"] if module == "facet" else []
    done = run(sys.executable, "-m", module, *arguments, "--model", "demo", "--enable-mfu-metrics")
    assert (done.returncode, done.stderr) == (BAD_USAGE, "error: --enable-mfu-metrics is not supported yet\n")


def test_the_version_is_the_packages() -> None:
    done = command("version")
    assert done.returncode == 0
    assert done.stdout == command("serve", "--version").stdout
    assert done.stdout[0].isdigit()


def test_another_folder_of_our_name_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("")
    root = str(Path(__file__).parents[2])
    serve = "from server.main import serve; serve()"
    done = run(sys.executable, "-c", serve, cwd=tmp_path, PYTHONPATH=root)
    assert "come from different places" in done.stderr
    assert done.returncode == BAD_USAGE


def test_a_port_in_use_has_an_exit_code_of_its_own() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = command("serve", "--port", str(port))
    assert done.returncode == PORT_IN_USE
    assert done.stderr == (
        f"error: port {port} of 127.0.0.1 is in use: stop what listens there, or choose another with --port\n"
    )


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("192.0.2.1", "cannot listen on port 29550 of 192.0.2.1 for replicas on other machines"),
        ("node-1", "--data-parallel-address node-1: on the machine with the API, give it in numbers"),
    ],
)
def test_an_address_that_cannot_be_bound_is_refused_before_anything_is_loaded(
    address: str, expected: str
) -> None:
    away = ["-dp", "2", "--data-parallel-size-local", "1", "--data-parallel-address", address]
    done = command("serve", "--port", "0", *away, FACET_CLUSTER_KEY="a secret that is long enough")
    assert done.returncode == PORT_IN_USE
    assert done.stderr.startswith(f"error: {expected}") and len(done.stderr.splitlines()) == 1


def test_an_address_that_is_not_ours() -> None:
    done = command("serve", "--host", "192.0.2.1")
    assert done.returncode == BAD_USAGE
    assert done.stderr.startswith("error: cannot listen on port 8000 of 192.0.2.1: ")


def test_clients_may_connect_as_soon_as_the_port_is_taken() -> None:
    with bind(parse(["--port", "0"], {})) as listener, socket.socket() as client:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        client.connect((host, port))


def test_a_unix_socket_left_behind_is_taken_over_but_not_a_living_one(tmp_path: Path) -> None:
    config = parse(["--uds", str(tmp_path / "s")], {})
    with bind(config), pytest.raises(OSError, match="in use"):
        bind(config)
    with bind(config) as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(listener.getsockname())


def test_a_unix_socket_never_replaces_a_file(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(OSError, match="in use"):
        bind(parse(["--uds", str(path)], {}))
    assert path.read_text() == "data"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], False),
        (["--host", "localhost"], False),
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--api-key", "k"], False),
        (["--host", "0.0.0.0", "--insecure"], False),
    ],
)
def test_a_server_without_a_key_that_others_reach_is_noticed(arguments: list[str], expected: bool) -> None:
    config = parse([*arguments, "--port", "0"], {})
    with bind(config) as listener:
        assert is_open_to_others(config, listener) is expected


def test_a_unix_socket_is_for_this_machine(tmp_path: Path) -> None:
    config = parse(["--uds", str(tmp_path / "s")], {})
    with bind(config) as listener:
        assert not is_open_to_others(config, listener)


def test_too_few_file_descriptors_are_refused_at_once() -> None:
    serve = f"exec {sys.executable} -c 'from server.main import serve; serve()'"
    done = run("sh", "-c", f"ulimit -n 63; {serve}")
    assert done.returncode == BAD_USAGE
    assert done.stderr.startswith("error: the limit of file descriptors is 63, and at least 64 are needed")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("kib", [150_000, 1_000_000])
def test_too_few_addresses_are_refused_at_once(kib: int) -> None:
    serve = f"exec {sys.executable} -c 'from server.main import serve; serve()'"
    done = run("sh", "-c", f"ulimit -v {kib}; {serve}")
    assert done.returncode == BAD_USAGE
    [line] = done.stderr.splitlines()
    assert line.startswith("error: a process may have") and "raise the limit" in line and "ulimit -v" in line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_file_gets_one_line_for_each_stage() -> None:
    out = io.StringIO()
    display = ProgressDisplay(out)
    for fraction in (0.0, 0.5, 1.0):
        display.show("weights", fraction)
    display.show("warmup", 0.0)
    display.show("unknown", 0.0)
    display.done("Serving")
    lines = out.getvalue().splitlines()
    assert [line.partition(" (")[0] for line in lines] == ["Loading weights", "Warming up", "Serving"]


def test_a_terminal_tells_how_far_each_replica_is_as_far_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = Terminal()
    display = ProgressDisplay(out)
    display.show("weights", 0.5, "replica 0: weights 50%, replica 1 starts")
    assert out.getvalue().endswith("50%  replica 0: weights 50%, replica 1 starts\r")
    display.show("weights", 0.5, ", ".join(f"replica {n} starts" for n in range(8)))
    line = out.getvalue().rpartition("\x1b[K")[2].rstrip("\r")
    assert len(line) == 79 and "replica 0 starts, replica 1 starts" in line


def test_a_terminal_gets_a_bar_that_leaves_nothing_behind() -> None:
    out = Terminal()
    display = ProgressDisplay(out)
    display.show("download", 0.5)
    assert " 50%" in out.getvalue()
    assert "\n" not in out.getvalue() and out.getvalue().endswith("\r"), "a log line is written over it"
    display.show("download", 1.0)
    assert out.getvalue().endswith("\r\x1b[K"), "a log line that comes now would stand behind the bar"
    display.done("Serving")
    assert out.getvalue().endswith("\r\x1b[KServing\n")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--api-key", "k"], True),
        (["--api-key=k"], True),
        (["--api_key", "k"], True),
        (["--api-key-file", "f"], False),
        (["demo"], False),
    ],
)
def test_a_key_on_the_command_line_is_noticed(arguments: list[str], shown: bool) -> None:
    assert shows_key(arguments) is shown


def test_a_file_of_keys_is_read_before_anything_is_started(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("[[keys]]\nname = 7\n")
    done = command("serve", "--api-key-file", str(file))
    assert done.returncode == 2
    assert done.stderr.strip() == (f"error: --api-key-file {file}: line 2: name: Expected str, got int")


def test_keys_are_made_by_a_command_of_their_own(tmp_path: Path) -> None:
    done = command("keys", "add", "alice", FACET_API_KEY_FILE=str(tmp_path / "keys.toml"))
    assert done.returncode == 0 and done.stdout.startswith("sk-")
    assert 'name = "alice"' in (tmp_path / "keys.toml").read_text()
