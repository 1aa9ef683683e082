"""HTTPS: certificates of the server and of clients, and files that are replaced while it runs."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from certificates import make_certificate, sign_certificate

from server.http.connection.sockets import make_tls_context
from server.options.connection_options import ConnectionOptions
from server.run import http_server
from server.run.http_server import HttpServer

Serve = Callable[..., Awaitable[tuple[HttpServer, tuple[str, int]]]]
Files = tuple[Path, Path]
"""The type of a key and its certificate."""

LIVE = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"


def make(folder: Path, name: str) -> Files:
    (folder / name).mkdir()
    return make_certificate(folder / name, name)


def trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def peer(address: tuple[str, int]) -> bytes | None:
    """The certificate that a server shows."""
    _, writer = await asyncio.open_connection(*address, ssl=trusting())
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return shown


async def accepts(address: tuple[str, int], files: Files | None) -> bool:
    """Whether a request is answered whose client shows this certificate."""
    context = trusting()
    if files is not None:
        context.load_cert_chain(*reversed(files))
    try:
        reader, writer = await asyncio.open_connection(*address, ssl=context)
    except OSError:
        return False
    try:
        writer.write(LIVE)
        async with asyncio.timeout(60):
            return (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    except (OSError, asyncio.IncompleteReadError):
        return False
    finally:
        writer.transport.abort()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """The files of a server, of two authorities, and of clients with certificates of these."""
    folder = tmp_path_factory.mktemp("certificates")
    found = {name: make(folder, name) for name in ("server", "authority", "other")}
    found["client"] = sign_certificate(folder / "client", "client", found["authority"])
    found["expired"] = sign_certificate(folder / "expired", "expired", found["authority"], days=-1)
    found["stranger"] = sign_certificate(folder / "stranger", "stranger", found["other"])
    return found


def https(files: dict[str, Files], *more: str) -> list[str]:
    key, certificate = files["server"]
    return ["--ssl-keyfile", str(key), "--ssl-certfile", str(certificate), *more]


async def test_a_certificate_is_replaced_without_a_restart(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, certificate = make_certificate(tmp_path)
    server, address = await serve("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate))
    first = await peer(address)
    server.reload_certificate()
    assert await peer(address) == first
    make_certificate(tmp_path, "b")
    server.reload_certificate()
    second = await peer(address)
    assert second != first
    certificate.write_text("half a certi")
    server.reload_certificate()
    assert await peer(address) == second and "the old one stays" in caplog.text


def test_nobody_is_asked_for_the_passphrase_of_a_key(files: dict[str, Files], tmp_path: Path) -> None:
    (key, certificate), locked = map(str, files["server"]), str(tmp_path / "locked")
    lock = ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:x", "-out", locked]
    subprocess.run(lock, check=True, capture_output=True)
    with pytest.raises(OSError, match=r"--ssl-keyfile: .*: the key is encrypted: `openssl pkey"):
        make_tls_context(ConnectionOptions(ssl_keyfile=locked, ssl_certfile=certificate))


@pytest.mark.parametrize(
    ("asked", "without"), [((), False), (("--ssl-cert-reqs", "2"), False), (("--ssl-cert-reqs", "1"), True)]
)
async def test_only_clients_with_a_certificate_that_is_right_are_answered(
    serve: Serve, files: dict[str, Files], asked: tuple[str, ...], without: bool
) -> None:
    _, address = await serve(*https(files, "--ssl-ca-certs", str(files["authority"][1]), *asked))
    found = {name: await accepts(address, files[name]) for name in ("client", "expired", "stranger")}
    assert found == {"client": True, "expired": False, "stranger": False}
    assert await accepts(address, None) is without


async def test_ciphers_are_those_that_the_operator_names(serve: Serve, files: dict[str, Files]) -> None:
    _, address = await serve(*https(files, "--ssl-ciphers", "ECDHE-ECDSA-AES256-GCM-SHA384"))
    context = trusting()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    _, writer = await asyncio.open_connection(*address, ssl=context)
    assert writer.get_extra_info("cipher")[0] == "ECDHE-ECDSA-AES256-GCM-SHA384"
    writer.transport.abort()
    context.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
    with pytest.raises((ssl.SSLError, OSError)):
        await asyncio.open_connection(*address, ssl=context)


async def test_files_that_change_are_used_anew_and_open_connections_go_on(
    serve: Serve, files: dict[str, Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_TICK_SECONDS", 0.02)
    authorities = tmp_path / "authorities"
    shutil.copy(files["authority"][1], authorities)
    _, address = await serve(*https(files, "--ssl-ca-certs", str(authorities), "--enable-ssl-refresh"))
    context = trusting()
    context.load_cert_chain(*reversed(files["client"]))
    reader, writer = await asyncio.open_connection(*address, ssl=context)
    assert not await accepts(address, files["stranger"])

    renewed = tmp_path / "renewed"
    shutil.copy(files["other"][1], renewed)
    os.replace(renewed, authorities)
    async with asyncio.timeout(60):
        while not await accepts(address, files["stranger"]):
            await asyncio.sleep(0.02)
    assert not await accepts(address, files["client"]), "its authority is trusted no more"
    writer.write(LIVE)
    async with asyncio.timeout(60):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    writer.transport.abort()
