"""Measures prompts that outlive a kill -9: the first token after a restart, and decoding beside writing.

    PYTHONPATH=.:tests/support python tests/bench/restarts.py [NAME or FOLDER] [--tokens 3500] [--turns 3]

NAME is a shape of tests/bench/checkpoints.py. The server with a disk answers a prompt and is killed when it
has written the blocks; started again it gets the prompt as soon as it is ready. That without has nothing to
find. All answers must be the same to the last bit of their logprobs. --embed asks for a MEAN vector instead.
Then both, in turns, decode behind a prompt that nobody has read, whose blocks the one writes meanwhile.
"""

import argparse
import http.client
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoints import SHAPES, make
from servers import NAME, Server, Side, tree
from work import Model

_WRITING_SECONDS = 3.0
_POOLING = '{"pooling_type": "MEAN"}'
_EMBEDS = ("--runner", "pooling", "--convert", "embed", "--pooler-config", _POOLING)


def ask(server: Server, path: str, body: dict[str, Any]) -> tuple[list[float], bytes]:
    """When each line of the answer with a token came, in seconds since the request, and all lines."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    began, times, lines = time.monotonic(), list[float](), list[bytes]()
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    for line in answer:
        if line.strip() and not line.startswith((b":", b"data: [DONE]")):  # neither comments nor the end
            times.append(time.monotonic() - began)
            lines.append(line)
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"{path}: {b''.join(lines)!r}")
    return times, b"\n".join(lines)


class Bench:
    def __init__(self, given: argparse.Namespace, folder: Path, disk: Path) -> None:
        self.given, self._folder, self._disk = given, folder, disk
        self._model = Model(folder.name)

    @contextmanager
    def serving(self, *, disk: bool) -> Iterator[Server]:
        """A server that is killed, with all of its processes, behind the block."""
        more = ["--kv-cache-dir", str(self._disk), "--kv-cache-disk-gib", "20"] if disk else []
        more += _EMBEDS if self.given.embed else []
        most = str(self.given.tokens + 512)

        def command(folder: Path, model: Model, port: int) -> list[str]:
            words = [sys.executable, "-P", "-m", "server.main", str(folder), "--port", str(port)]
            words += ["--served-model-name", NAME, "--max-model-len", most, "--kv-cache-memory-bytes", "2G"]
            return [*words, "--no-enable-log-requests", *more]

        server = Server(
            Side("restarts-disk" if disk else "restarts-plain", "", command), self._folder, self._model
        )
        try:
            server.wait_ready()
            yield server
        finally:
            for pid in tree(server.pid):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(server.pid, 0)

    def prompt(self, number: int) -> list[int]:
        return random.Random(number).choices(range(1000, 16_000), k=self.given.tokens)

    def first(self, server: Server, prompt: list[int]) -> tuple[float, object]:
        """The seconds to the first token, or to the vector, and what must be the same bits."""
        if self.given.embed:
            times, data = ask(server, "/v1/embeddings", {"input": prompt, "encoding_format": "base64"})
            return times[0], json.loads(data)["data"]
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 3}
        times, data = ask(server, "/v1/completions", {**body, "stream": True})
        choices = [json.loads(line[5:])["choices"][0] for line in data.splitlines() if line[5:].strip()]
        return times[0], [entry for choice in choices for entry in choice["logprobs"]["top_logprobs"]]

    def restart(self, turn: int) -> dict[bool, float]:
        """The seconds from ready to the first token with and without a disk, after a kill -9."""
        prompt, found, truths = self.prompt(turn), dict[bool, float](), list[object]()
        with self.serving(disk=True) as server:
            self.first(server, prompt)
            time.sleep(_WRITING_SECONDS)  # an engine without work writes at once
        for disk in (True, False):
            with self.serving(disk=disk) as server:
                found[disk], said = self.first(server, prompt)
                truths.append(said)
        assert truths[0] == truths[1], f"the answers differ: {truths}"
        return found

    def decoding(self, turn: int) -> dict[bool, float]:
        """The seconds of a token that is decoded while blocks of a long prompt are written, and are not."""
        found: dict[bool, float] = {}
        for disk in (True, False) if turn % 2 else (False, True):
            with self.serving(disk=disk) as server:
                self.first(server, self.prompt(-1)[:64])
                body = {
                    "prompt": self.prompt(1000 + turn),
                    "max_tokens": 384,
                    "temperature": 0,
                    "stream": True,
                }
                more = {"ignore_eos": True, "speculative_tokens": 0}
                times, _ = ask(server, "/v1/completions", {**body, **more})
                found[disk] = (times[-1] - times[0]) / (len(times) - 1)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, default=3500)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--embed", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd().parent) as scratch:
        folder = Path(given.model)
        if given.model in SHAPES:
            folder = Path(scratch) / "models" / given.model
            make(given.model, folder)
        bench = Bench(given, folder.absolute(), Path(scratch) / "disk")
        restarts = [bench.restart(turn) for turn in range(given.turns)]
        for disk, how in ((True, "with a disk"), (False, "without")):
            seconds = [f"{each[disk]:.3f}" for each in restarts]
            print(f"ready to first token {how}: {', '.join(seconds)} s (0.3 wanted with a disk)", flush=True)
        if not given.embed:
            decoded = [bench.decoding(turn) for turn in range(given.turns)]
            lost = statistics.median(each[True] / each[False] - 1 for each in decoded)
            shown = ", ".join(f"{each[True] * 1e3:.2f} and {each[False] * 1e3:.2f}" for each in decoded)
            print(f"a token beside writing and without, ms: {shown}: {lost:+.1%} (3 % at most wanted)")


if __name__ == "__main__":
    main()
