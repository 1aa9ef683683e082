"""Checks of what options name, before anything is started, and what they leave open."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

from msgspec.structs import replace

from server.options.option_parsing import OptionError
from server.options.server_flags import ServerConfig
from worker import logs

_DEFAULT_ADDRESS = "127.0.0.1"


def check_parsers(config: ServerConfig) -> None:
    """Raises OptionError if parsers are named that are not there."""
    plugins = config.plugins.parsers
    if config.tool_call_parser == config.reasoning_parser == "auto" and not plugins:
        return
    from server.output_parsing.parser_plugins import load_parsers
    from server.output_parsing.tool_call_dialects import (  # only here, to start sooner
        AUTO,
        dialect_named,
        thinking_named,
    )

    try:
        load_parsers(plugins)
        if config.tool_call_parser != AUTO:
            dialect_named(config.tool_call_parser)
        if config.reasoning_parser != AUTO:
            thinking_named(config.reasoning_parser)
    except ValueError as error:
        raise OptionError(str(error)) from None


def check_files(config: ServerConfig) -> None:
    """Raises OptionError if a file or folder that options name cannot be used."""
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        flag, path = "--" + name.replace("_", "-"), getattr(config.connections, name)
        if path is not None and not Path(path).is_file():
            raise OptionError(f"{flag}: there is no file {path}")
    if (folder := config.media.allowed_local_media_path) and not Path(folder).is_dir():
        raise OptionError(f"--allowed-local-media-path: there is no folder {folder}")
    if (keys := config.access.api_key_file) is not None:
        from server.access.key_file import KeyFileError, read_keys  # few servers need it

        try:
            read_keys(Path(keys))
        except KeyFileError as error:
            raise OptionError(f"--api-key-file {error}") from None
    if (file := config.log.log_config_file) is not None:
        try:
            logs.apply_config(file)
        except ValueError as error:
            raise OptionError(str(error)) from None
    if config.connections.ssl_certfile is not None:
        from server.http.connection.sockets import make_tls_context  # imports ssl, which few servers need

        try:
            make_tls_context(config.connections)
        except OSError as error:
            raise OptionError(str(error)) from None


def check_kept(config: ServerConfig) -> None:
    """Raises OptionError if the folder of work that waits, the table of moderation, or the calibration of
    decisions cannot be used."""
    if (table := config.moderation_categories) is not None:
        from server.requests.labels.moderation import read_table  # few servers need it

        try:
            read_table(Path(table))
        except ValueError as error:
            raise OptionError(f"--moderation-categories {error}") from None
    if (calibration := config.decisions.calibration) is not None:
        from server.requests.decisions import read_temperatures  # few servers need it

        try:
            read_temperatures(Path(calibration).expanduser())
        except ValueError as error:
            raise OptionError(f"--calibration {error}") from None
    if (folder := config.batches.batch_dir) is not None:
        from server.batches.folder import Folder  # few servers need it

        try:
            Folder(Path(folder), config.batches.most_bytes).check()
        except OSError as error:
            raise OptionError(f"--batch-dir {folder} cannot be used: {error.strerror}") from None


def with_ray(config: ServerConfig) -> ServerConfig:
    """Fill in how replicas that Ray places find this server: its address, and a secret of this run."""
    if not config.replicas.by_ray:
        return config
    address = config.data_parallel_address
    return replace(
        config,
        data_parallel_address=_own_address() if address == _DEFAULT_ADDRESS else address,
        engine=replace(config.engine, cluster_key=config.engine.cluster_key or secrets.token_hex(32)),
    )


def _own_address() -> str:
    """The address of this machine on the way to others. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation, on no network
        except OSError:
            return _DEFAULT_ADDRESS  # it has no network
        return probe.getsockname()[0]
