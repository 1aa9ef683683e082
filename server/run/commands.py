"""The commands `serve`, `facet` and `bench`: read the options, bind the port, start all processes, keep them.

The order makes the start short: the port is bound and the engines and API servers run (they import large
libraries) before this process imports what it needs to supervise them.
"""

from __future__ import annotations

import difflib
import errno
import io
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from engine_core.engine_children import EngineProcesses, start_engines
from server.http.connection.connection_limits import why_too_few_descriptors
from server.options.model_list import ModelEntry
from server.options.option_checks import is_loopback
from server.options.option_parsing import OptionError
from server.options.parse_server_options import Given, read
from server.options.server_flags import ServerConfig
from server.run.api_children import ApiProcesses
from server.run.start_checks import check_files, check_kept, check_parsers, with_ray
from server.terminal.command_table import TERMINAL, USAGE
from worker import logs
from worker.host.machine import why_too_few_addresses

if TYPE_CHECKING:
    from server.run.model_processes import ModelProcesses

FAILED, BAD_USAGE, PORT_IN_USE, INTERRUPTED = 1, 2, 98, 130
BACKLOG = 2048
ENGINE_SECONDS = 3.0
"""Seconds that an engine gets to end by itself when it has nothing left to do."""

BENCH_USAGE = """usage: {command} serve [options]    load on a server that runs
       {command} serve --help
"""

_log = logging.getLogger(__name__)


_ALONE = ("version", "--version", "-V", "help", "--help", "-h")
"""Commands that take no words."""


def run(command: str, arguments: Sequence[str]) -> int:
    """Run `serve`, `bench` or `facet`, and return the exit code."""
    match [command, *arguments]:
        case ["serve", *rest]:
            return _serve(rest, command)
        case ["facet", "serve", *rest]:
            return _serve(rest, "facet serve")
        case ["bench", *rest]:
            return _printing(lambda: _bench(rest, command))
        case _:
            return _printing(lambda: _command(arguments))


def _printing(run: Callable[[], int]) -> int:
    """Run a command whose output may go to a full disk, or to a pipe that nobody reads any more."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it was closed when the command was started
            null = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(null, mode, closefd=False))  # noqa: SIM115  # it stays open
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not know a model's letters
    try:
        code = run()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        pass
    except OSError as error:
        _fail(str(error), FAILED)
    with suppress(OSError):  # or Python tries once more when it exits, and complains
        sys.stdout.close()
    return FAILED


def _command(words: Sequence[str]) -> int:
    match words:
        case ["bench", *arguments]:
            return _bench(arguments, "facet bench")
        case [name, *arguments] if name in TERMINAL:
            return _call(TERMINAL[name], arguments, f"facet {name}")
        case ["version" | "--version" | "-V"]:
            _print_version()
            return 0
        case ["--help" | "-h" | "help"]:
            print(USAGE, end="")
            return 0
        case [name, *_]:
            if name in _ALONE:
                return _fail(f"facet {name} stands alone: leave out {' '.join(words[1:])}", BAD_USAGE)
            near = difflib.get_close_matches(name, ("serve", "bench", "version", *TERMINAL), n=1)
            meant = f"did you mean {near[0]}?" if near else "facet --help lists all"
            return _fail(f"there is no command {name}; {meant}", BAD_USAGE)
        case _:
            print(USAGE, end="", file=sys.stderr)
            return BAD_USAGE


def _bench(arguments: Sequence[str], command: str) -> int:
    match arguments:
        case ["serve", *rest]:
            return _call("server.bench.serve_benchmark", rest, f"{command} serve")
        case ["--help" | "-h"]:
            print(BENCH_USAGE.format(command=command), end="")
            return 0
        case [name, *_]:
            return _fail(f"{command} {name} is not there; {command} serve is", BAD_USAGE)
        case _:
            print(BENCH_USAGE.format(command=command), end="", file=sys.stderr)
            return BAD_USAGE


def _call(module: str, arguments: Sequence[str], command: str) -> int:
    """Call a command's module, which is not needed to serve."""
    from server.terminal.console import CommandError

    try:
        return import_module(module).run(arguments, command)
    except OptionError as error:
        return _fail(str(error), BAD_USAGE)
    except CommandError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return INTERRUPTED


def _print_version() -> None:
    from importlib.metadata import version

    print(version("facet-serve"))


def _serve(arguments: Sequence[str], command: str) -> int:
    started = time.monotonic()
    logs.guard_stderr()
    if "--version" in arguments:
        _print_version()
        return 0
    notes: list[str] = []
    try:
        given = read(arguments, command=command, notes=notes)
        models = given.read_models() if given.has_several else []
        config = with_ray(models[0].config if models else given.config())
        if reason := why_too_few_descriptors() or why_too_few_addresses():
            raise OptionError(reason)
        check_files(config)
        check_kept(config)
        for each in [entry.config for entry in models] or [config]:
            check_parsers(each)
    except OptionError as error:
        return _fail(str(error), BAD_USAGE)
    if config.headless:
        return _run_headless(config, notes)
    try:
        listener = bind(config)
    except OSError as error:
        return _explain_bind(config, error)
    if config.replicas.elsewhere and (reason := _why_unreachable(config)):
        return _fail(reason, PORT_IN_USE)
    if shows_key(arguments):
        notes.append(
            "all users of this machine see --api-key on the command line: put the key into the variable "
            "FACET_API_KEY or VLLM_API_KEY, or use --api-key-file"
        )
    if models:
        return _run_models(config, models, given, listener, started, notes)
    unnamed = not given.tags and "model" not in given.values
    return _run(config, listener, started, notes, unnamed=unnamed)


def shows_key(arguments: Sequence[str]) -> bool:
    """Whether the command line has a key in it."""
    return any(word.partition("=")[0].replace("_", "-") == "--api-key" for word in arguments)


def _run_headless(config: ServerConfig, notes: Sequence[str]) -> int:
    from server.run import headless  # imports no HTTP

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logs.setup("headless", config.log.style)
    _say(notes)
    try:
        return headless.run(config)
    except KeyboardInterrupt:
        return 0
    except (ValueError, OSError) as error:
        return _fail(str(error), BAD_USAGE)


def _say(notes: Sequence[str]) -> None:
    """Log what the operator should know of what was asked for."""
    for note in notes:
        _log.warning("%s", note)


def _begin(config: ServerConfig, listener: socket.socket, notes: Sequence[str]) -> None:
    """Get ready to start processes."""
    # Until the event loop handles signals, one ends this process, and its children with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logs.setup("supervisor", config.log.style)
    _say(notes)
    if is_open_to_others(config, listener):
        _log.warning(
            "other machines can use this server without a key: give --api-key-file, or --insecure if that is "
            "meant"
        )


def _run(
    config: ServerConfig, listener: socket.socket, started: float, notes: Sequence[str], *, unnamed: bool
) -> int:
    _begin(config, listener, notes)
    try:
        engines = start_engines(
            config.engine,
            config.replicas,
            api_servers=config.api_server_count,
            drain_seconds=config.shutdown_timeout,
            log_level=config.log.style,
            debug_steps=config.log.debug_steps,
        )
    except (ValueError, OSError) as error:  # a place for sockets, or processes, that cannot be had
        return _fail(str(error), BAD_USAGE)
    if unnamed:
        from server.terminal import suggestions

        _log.info("%s", suggestions.hint())
    return _supervise(config, listener, engines, (), started)


def _run_models(
    config: ServerConfig,
    models: Sequence[ModelEntry],
    given: Given,
    listener: socket.socket,
    started: float,
    notes: Sequence[str],
) -> int:
    """Serve several models; `given` says what they are whenever they are read again."""
    from server.run.model_processes import ModelProcesses  # imports asyncio

    _begin(config, listener, notes)
    try:
        engines = ModelProcesses(config, models, given.read_models)
    except (ValueError, OSError) as error:
        return _fail(str(error), BAD_USAGE)
    return _supervise(config, listener, engines, models, started)


def _supervise(
    config: ServerConfig,
    listener: socket.socket,
    engines: EngineProcesses | ModelProcesses,
    models: Sequence[ModelEntry],
    started: float,
) -> int:
    try:
        servers = ApiProcesses(config, listener, engines.run_folder, engines.addresses, started, models)
        from server.run import supervisor  # imports asyncio while the others begin

        code = supervisor.run(config, listener, engines, servers)
    except KeyboardInterrupt:
        return 0
    finally:
        engines.stop(ENGINE_SECONDS)
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)
    # The port closes with the process. Whoever connected while Python cleans up would get no answer.
    os._exit(code)


def bind(config: ServerConfig) -> socket.socket:
    """Returns the listening socket. Clients may connect from now on, and are answered when the loop runs."""
    if config.uds is not None:
        family, address = socket.AF_UNIX, config.uds
        _remove_stale(config.uds)
    else:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        address = (config.host, config.port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def is_open_to_others(config: ServerConfig, listener: socket.socket) -> bool:
    """Whether other machines can use the server without a key, and nobody has said that they may."""
    if config.uds is not None or config.access.is_guarded or config.insecure:
        return False
    return not is_loopback(listener.getsockname()[0])


def _remove_stale(path: str) -> None:
    """Removes the socket file of an earlier server, if nobody answers there any more."""
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def _explain_bind(config: ServerConfig, error: OSError) -> int:
    where = config.uds or f"port {config.port} of {config.host}"
    if error.errno == errno.EADDRINUSE:
        remedy = "--uds" if config.uds else "--port"
        return _fail(
            f"{where} is in use: stop what listens there, or choose another with {remedy}", PORT_IN_USE
        )
    return _fail(f"cannot listen on {where}: {error.strerror or error}", BAD_USAGE)


def _why_unreachable(config: ServerConfig) -> str | None:
    """Why replicas on other machines could not connect; None if they can.

    Checked before a model is loaded, which takes long.
    """
    address, first = config.data_parallel_address, config.data_parallel_rpc_port
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError:
        return f"--data-parallel-address {address}: on the machine with the API, give it in numbers"
    for port in range(first, first + 2 * config.api_server_count):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                return (
                    f"cannot listen on port {port} of {address} for replicas on other machines: "
                    f"{error.strerror or error}; see --data-parallel-address and --data-parallel-rpc-port"
                )
    return None


def _fail(reason: str, code: int) -> int:
    logs.print_error(reason)
    return code
