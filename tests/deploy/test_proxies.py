"""The proxies' own programs with our files: an event reaches the client before the next one is made."""

import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from deploy_tools import DEPLOY, run, tool
from live import wait_until
from ports import free_ports

from server.options.parse_server_options import OPTIONS
from server.routes.batches import MOST_FILE

EVENTS = [b"data: %d\n\n" % number for number in range(4)]


class Upstream:
    """A server that sends an event only when the client has seen the one before."""

    def __init__(self) -> None:
        self.seen = threading.Semaphore(0)
        seen = self.seen

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:  # the proxy's health checks
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for event in EVENTS:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
                    self.wfile.flush()
                    if not seen.acquire(timeout=60):
                        return  # the client has not seen it: the answer breaks off
                self.wfile.write(b"0\r\n\r\n")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    upstream = Upstream()
    yield upstream
    upstream.stop()


def start_nginx(folder: Path, upstream: int, port: int) -> list[str]:
    """The command of nginx with our file, other ports, and its own files in `folder`."""
    ours = (DEPLOY / "proxies" / "nginx.conf").read_text()
    assert "listen 80;" in ours and "127.0.0.1:8000" in ours
    ours = ours.replace("listen 80;", f"listen 127.0.0.1:{port};").replace(
        "127.0.0.1:8000", f"127.0.0.1:{upstream}"
    )
    paths = "".join(
        f"{name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; pid {folder}/pid; error_log stderr;\nevents {{}}\n"
        f"http {{ access_log off;\n{paths}{ours} }}\n"
    )
    run("nginx", "-t", "-q", "-e", "stderr", "-c", config)
    return [tool("nginx"), "-e", "stderr", "-c", str(config)]


def start_envoy(folder: Path, upstream: int, port: int) -> list[str]:
    text = (DEPLOY / "proxies" / "envoy.yaml").read_text()
    assert "port_value: 8080" in text and "port_value: 8000" in text
    text = text.replace("0.0.0.0, port_value: 8080", f"127.0.0.1, port_value: {port}")
    config = folder / "envoy.yaml"
    config.write_text(text.replace("port_value: 8000", f"port_value: {upstream}"))
    return [tool("envoy"), "-c", str(config), "--concurrency", "1", "--use-dynamic-base-id", "-l", "error"]


@pytest.mark.parametrize("start", [start_nginx, start_envoy])
def test_events_arrive_one_by_one(
    start: Callable[[Path, int, int], list[str]], upstream: Upstream, tmp_path: Path
) -> None:
    port = free_ports()
    command = start(tmp_path, upstream.port, port)
    log = (tmp_path / "log").open("wb")
    proxy = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}/v1/completions"
    try:
        wait_until(lambda: _answers(url), 60, lambda: (tmp_path / "log").read_text())
        with httpx.stream("POST", url, json={"stream": True}, timeout=60) as answer:
            came = b""
            for piece in answer.iter_raw():
                came += piece
                if came.endswith(b"\n\n"):
                    upstream.seen.release()
        assert came == b"".join(EVENTS)
    finally:
        proxy.terminate()
        proxy.wait(60)
        log.close()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10, verify=False).status_code == 200
    except httpx.TransportError:
        return False


def test_options_that_the_files_name_are_there() -> None:
    flags = {option.flag for option in OPTIONS}
    for path in (DEPLOY / "proxies").iterdir():
        assert "--allowed-hosts" in path.read_text() and "--allowed-hosts" in flags


def test_nginx_takes_the_longest_body_that_the_server_takes() -> None:
    [megabytes] = re.findall(r"client_max_body_size (\d+)m;", (DEPLOY / "proxies" / "nginx.conf").read_text())
    assert int(megabytes) << 20 > MOST_FILE
