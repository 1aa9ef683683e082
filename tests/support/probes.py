"""Clients that ask a server again and again, through new connections, while a test does it harm."""

import http.client
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Probes:
    """What became of all questions. Each is the status of an answer, or the name of an exception."""

    port: int
    seen: dict[str, list[tuple[float, int | str]]] = field(default_factory=dict)
    """Path -> the time of each answer or failure, and what it was."""

    def counts(self, path: str) -> Counter[int | str]:
        return Counter(what for _, what in self.seen[path])

    @property
    def refused(self) -> int:
        return sum(self.counts(path)["ConnectionRefusedError"] for path in self.seen)

    def first(self, path: str, what: int | str, since: float) -> float:
        """The seconds from then until this answer came first."""
        return next(at for at, seen in self.seen[path] if at >= since and seen == what) - since

    def ask(self, path: str) -> int | str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        finally:
            connection.close()


@contextmanager
def probing(port: int, *paths: str, every: float = 0.005) -> Iterator[Probes]:
    """Ask for each path in a thread of its own, until the block ends."""
    probes = Probes(port)
    over = threading.Event()

    def keep_asking(path: str) -> None:
        seen = probes.seen[path]
        while not over.is_set():
            what = probes.ask(path)
            seen.append((time.monotonic(), what))
            if what == "ConnectionRefusedError":
                return  # the server is gone, as the test expects or finds out
            over.wait(every)

    probes.seen = {path: [] for path in paths}
    threads = [threading.Thread(target=keep_asking, args=(path,)) for path in paths]
    for thread in threads:
        thread.start()
    try:
        yield probes
    finally:
        over.set()
        for thread in threads:
            thread.join()
