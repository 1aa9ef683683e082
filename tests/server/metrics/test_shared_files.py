"""Files of shared metrics on a disk that is full. A process of its own counts: prometheus_client is told of
sharing before it is imported.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from server.metrics import shared_files
from server.metrics.shared_files import make_files

PROCESS = """
import resource, signal, sys
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from server.metrics import shared_files
from server.options.parse_server_options import share_metrics
folder = Path(sys.argv[1])
shared_files.FIRST_BYTES = 1 << 16
assert shared_files.make_files(folder) is None
share_metrics(folder)
shared_files.keep_files_allocated()
from server.metrics.server_metrics import Metrics
metrics = Metrics("m", folder)
metrics.http("first", "GET", 200, 0.1)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
for number in range(1000):
    metrics.http(f"handler {number}", "GET", 200, 0.1)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
metrics.http("handler 999", "GET", 200, 0.1)
print(metrics.page().decode())
"""


def test_values_that_a_full_disk_cannot_hold_are_not_shown_until_it_can(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROCESS, tmp_path]
    page = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counted = [line for line in page.splitlines() if line.startswith("http_requests_total{")]
    assert 'http_requests_total{handler="first",method="GET",status="2xx"} 1.0' in counted
    assert 'http_requests_total{handler="handler 999",method="GET",status="2xx"} 2.0' in counted
    assert 100 < len(counted) < 1000, "some had room in the file"
    assert all(path.stat().st_blocks * 512 >= path.stat().st_size for path in tmp_path.iterdir())


def test_files_that_cannot_be_made_are_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_files.os, "getpid", lambda: 7)
    (tmp_path / "histogram_7.db").symlink_to("/dev/full")
    assert make_files(tmp_path) == "No space left on device"
    assert not list(tmp_path.iterdir())
