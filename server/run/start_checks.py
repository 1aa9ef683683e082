"""Checks of what options name, before anything is started."""

from __future__ import annotations

from pathlib import Path

from server.options.option_table import OptionError
from server.options.server_config import ServerConfig
from worker import logs


def check_parsers(config: ServerConfig) -> None:
    """Raises OptionError if parsers are named that are not there."""
    plugins = config.plugins.parsers
    if config.tool_call_parser == config.reasoning_parser == "auto" and not plugins:
        return
    from server.answers.dialects import AUTO, dialect_named, thinking_named  # only here, to start sooner
    from server.answers.parser_plugins import load_parsers

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
    """Raises OptionError if the folder of work that waits, or the table of moderation, cannot be used."""
    if (table := config.moderation_categories) is not None:
        from server.requests.moderation import read_table  # few servers need it

        try:
            read_table(Path(table))
        except ValueError as error:
            raise OptionError(f"--moderation-categories {error}") from None
    if (folder := config.batches.batch_dir) is not None:
        from server.batches.folder import Folder  # few servers need it

        try:
            Folder(Path(folder), config.batches.most_bytes)
        except OSError as error:
            raise OptionError(f"--batch-dir {folder} cannot be used: {error.strerror}") from None
