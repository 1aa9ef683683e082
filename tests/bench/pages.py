"""Measures what pages cost: a second query about the same ones, a stream beside many of them, the start, and
a text that has none; and what large pictures cost others.

    PYTHONPATH=.:tests/support python tests/bench/pages.py rerank [--pages 100] [--restart]
    PYTHONPATH=.:tests/support python tests/bench/pages.py stream [--clients 72] [--seconds 30]
    PYTHONPATH=.:tests/support python tests/bench/pages.py start [--turns 5]
    PYTHONPATH=.:tests/support python tests/bench/pages.py text [--turns 5]
    PYTHONPATH=.:tests/support python tests/bench/pages.py large [--clients 8] [--pictures 1000]

The model has the shape of Qwen3-VL in small, random weights in float32, and about as much work in its tower
for each page as in its text, as the 2B model has. A page is a JPEG of 1240 x 1754, of which the model reads
600 embeddings. Each is another file with the same pixels, so that no cache knows it. With `--restart` the
second query asks a server that was started again, which finds on disk what the first has left there.

`large` serves a tiny LLaVA. It tells how long a JPEG of 1600 x 1200 takes from its body to the tokens of its
prompt; the gaps of a stream and the times of `/health` alone and while clients send pictures of 20
megapixels; and what the API process has grown by after so many pictures.
"""

import argparse
import asyncio
import base64
import io
import json
import re
import sys
import tempfile
import time
from contextlib import closing, suppress
from itertools import count, pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
from pictured import write_pictured
from pictured_chat import LLAVA, QWEN, write_chat_files, write_llava
from PIL import Image, ImageDraw
from qwen_pictured import FIELDS, TOKENS
from safetensors import safe_open
from servers import Server, Side
from startup import measure
from work import Model

from server.bench.http_client import Client

_SHAPES = {"small": (384, 10, 192, 4), "tiny": (128, 4, 64, 3)}
"""The width and the layers of the text, and those of the tower."""
_LONGEST = 1 << 15
"""The tokens of the stream beside large pictures, at most."""
_SEEN = "<|vision_start|><|image_pad|><|vision_end|>"
_PART = "{% if c.type == 'image' %}" + _SEEN + "{% else %}{{ c.text }}{% endif %}"
_SIDE = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}PART{% endfor %}{% endif %}"
)
_PAIRS = "{% for role in ROLES %}{% for m in messages if m.role == role %}SIDE {% endfor %}{% endfor %}"
_SCORES = json.dumps({"classifier_from_token": [10, 20], "method": "from_2_way_softmax"})


def write_model(folder: Path, shape: str) -> None:
    width, layers, inner, depth = _SHAPES[shape]
    text, tower = FIELDS["Qwen3VLForConditionalGeneration"]
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [12, 10, 10]}
    text |= {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    text |= {"head_dim": 64, "num_attention_heads": width // 64, "num_key_value_heads": width // 128}
    text |= {"max_position_embeddings": 1 << 15, "rope_parameters": {**rope, "rope_theta": 5e6}}
    tower |= {"hidden_size": inner, "intermediate_size": 4 * inner, "depth": depth, "num_heads": inner // 64}
    tower |= {"out_hidden_size": width, "deepstack_visual_indexes": [0, 1, 2]}
    tower |= {"num_position_embeddings": 2304}
    fields = {"text_config": text, "vision_config": tower, **TOKENS}
    settings = {"patch_size": 16, "size": {"shortest_edge": 1 << 16, "longest_edge": 640 * 960}}
    settings["image_processor_type"] = "Qwen2VLImageProcessorFast"
    write_pictured("Qwen3VLForConditionalGeneration", folder, fields, settings, scale=0.02)
    write_chat_files(folder, QWEN, _SEEN)


class Pages:
    """URLs of pages without end. The number of each stands in a comment at the beginning of its file."""

    def __init__(self, width: int = 1240, height: int = 1754) -> None:
        page = Image.new("RGB", (width, height), "white")
        draw = ImageDraw.Draw(page)
        for line in range(60):
            text = f"{line} " + "Some words that a page may have. " * 6
            draw.text((90, 80 + 26 * line), text, "black", font_size=17)
        file = io.BytesIO()
        page.save(file, "JPEG", quality=85)
        self._rest = base64.b64encode(file.getvalue()[2:]).decode()
        self._numbers = count()

    def part(self) -> dict[str, Any]:
        head = base64.b64encode(b"\xff\xd8\xff\xfe\x00\x0e%012d" % next(self._numbers)).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{head}{self._rest}"}}


def serve(folder: Path, *flags: str) -> Server:
    command = [sys.executable, "-P", "-m", "server.main", str(folder), "--dtype", "float32", *flags]
    side = Side("pages", "", lambda _, __, port: [*command, "--port", str(port)])
    server = Server(side, folder, Model("pages"))
    server.wait_ready()
    return server


def number(server: Server, name: str) -> float:
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


def rerank(folder: Path, asked: argparse.Namespace) -> None:
    pages, settings = Pages(), folder / "tokenizer_config.json"
    for order in (["query", "document"], ["document", "query"]):
        template = _PAIRS.replace("ROLES", str(order)).replace("SIDE", _SIDE).replace("PART", _PART)
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
        flags = ["--runner", "pooling", "--hf-overrides", _SCORES, "--max-media-mb", "512"]
        if asked.restart:
            flags += ["--kv-cache-dir", str(folder.parent / order[0])]
        documents, seconds, encoded = (
            [{"content": [pages.part()]} for _ in range(asked.pages)],
            list[float](),
            0.0,
        )
        queries = ["What was the profit in 2023?", "Who signed the report?"]
        for part in [[query] for query in queries] if asked.restart else [queries]:
            with closing(serve(folder, *flags)) as server:
                seconds += [ask(server, query, documents) for query in part]
                encoded += number(server, "facet:media_encoded_total")
        first, second = seconds
        told = f"{first:.1f} s, then {second:.1f} s: {second / first:.2f}; {encoded:.0f} pages encoded"
        print(f"{order[0]} first: {told}", flush=True)


def ask(server: Server, query: str, documents: list[dict[str, Any]]) -> float:
    """The seconds in which pages are ranked."""
    started = time.perf_counter()
    body = {"query": query, "documents": documents}
    answer = httpx.post(server.url + "/rerank", json=body, timeout=600)
    if answer.status_code != 200:
        raise SystemExit(answer.text)
    return time.perf_counter() - started


async def ask_without_pause(client: Client, pages: Pages, most: int = 4) -> None:
    while True:
        content = [pages.part() for _ in range(most)] + [{"type": "text", "text": "What do these say?"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "ignore_eos": True}
        status = await client.post("/v1/chat/completions", json.dumps(body).encode(), bytearray().extend)
        if status != 200:
            raise SystemExit(f"a request about pages got status {status}")


async def watch(server: Server, seconds: float, clients: int, streams: bool) -> tuple[float, list[float]]:
    """Tokens a second that the machine computes, and the gaps of a stream in ms, while clients ask."""
    pages, times, tokens = Pages(), list[float](), "vllm:iteration_tokens_total_sum"
    body = {"prompt": "Once", "max_tokens": 1 << 14, "ignore_eos": True, "stream": True}
    with closing(Client(server.url)) as client:
        tasks = [asyncio.create_task(ask_without_pause(client, pages)) for _ in range(clients)]
        await asyncio.sleep(seconds / 4 if clients else 0)
        if streams:
            note = lambda _: times.append(time.perf_counter())  # noqa: E731
            sent = client.post("/v1/completions", json.dumps(body).encode(), note)
            tasks.append(asyncio.ensure_future(sent))  # pyright: ignore[reportArgumentType]
        before, started = await asyncio.to_thread(number, server, tokens), time.perf_counter()
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        after, ended = await asyncio.to_thread(number, server, tokens), time.perf_counter()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return (after - before) / (ended - started), [1000 * (b - a) for a, b in pairwise(times)]


def stream(folder: Path, asked: argparse.Namespace) -> None:
    with closing(serve(folder, "--max-model-len", "20000")) as server:
        for clients, streams in ((0, True), (asked.clients, False), (asked.clients, True)):
            seconds = asked.seconds if clients else asked.seconds / 4
            rate, gaps = asyncio.run(watch(server, seconds, clients, streams))
            cuts = quantiles(gaps, n=100) if gaps else []
            told = f", gaps p50 {cuts[49]:.0f}, p90 {cuts[89]:.0f}, p99 {cuts[98]:.0f} ms" if cuts else ""
            print(f"{clients} clients: {rate:.0f} tokens/s{told}", flush=True)


def start(folder: Path, asked: argparse.Namespace) -> None:
    started = time.perf_counter()
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in filter(re.compile("visual").search, file.keys()):
            file.get_tensor(name).clone()
    tower, ready = time.perf_counter() - started, list[tuple[float, ...]]()
    for _ in range(asked.turns):
        sides = (["--dtype", "float32"], ["--dtype", "float32", "--language-model-only"])
        ready.append(tuple(measure(str(folder), flags).ready for flags in sides))
    whole, text = (median(times) for times in zip(*ready, strict=True))
    ratio = median(one / other for one, other in ready)
    print(f"ready after {whole:.2f} s, text alone {text:.2f} s: {ratio:.2f}; tower read in {tower:.3f} s")


def text(folder: Path, asked: argparse.Namespace) -> None:
    """Print what a text takes where there is a tower, beside what it takes without, in turns."""
    with closing(serve(folder)) as seeing, closing(serve(folder, "--language-model-only")) as blind:
        turns = [(write(seeing), write(blind)) for _ in range(asked.turns * 10)]
    ratio = median(one / other for one, other in turns)
    print(f"{1000 * median(one for one, _ in turns):.1f} ms, {ratio:.3f} times a text model's")


def write(server: Server) -> float:
    """The seconds that a text of 32 tokens takes."""
    started = time.perf_counter()
    body = {"prompt": "Once upon a time " * 16, "max_tokens": 32, "ignore_eos": True}
    httpx.post(server.url + "/v1/completions", json=body, timeout=60).raise_for_status()
    return time.perf_counter() - started


async def time_health(client: Client, seconds: list[float]) -> None:
    while True:
        started = time.perf_counter()
        await client.get("/health")
        seconds.append(time.perf_counter() - started)
        await asyncio.sleep(0.02)


async def large_pictures(server: Server, clients: int, seconds: float) -> str:
    """The gaps of a stream, and the times of `/health`, while so many clients send large pictures."""
    pictures, times, health = Pages(5472, 3648), list[float](), list[float]()
    body = {"prompt": "Once", "max_tokens": _LONGEST - 8, "ignore_eos": True, "stream": True}
    with closing(Client(server.url)) as client:
        tasks = [asyncio.create_task(ask_without_pause(client, pictures, 1)) for _ in range(clients)]
        await asyncio.sleep(3 if clients else 0)  # processes that prepare have started
        tasks.append(asyncio.create_task(time_health(client, health)))
        note = lambda _: times.append(time.perf_counter())  # noqa: E731
        sent = client.post("/v1/completions", json.dumps(body).encode(), note)
        with suppress(TimeoutError):
            await asyncio.wait_for(sent, seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    cuts, waits = quantiles([b - a for a, b in pairwise(times)], n=100), sorted(health)
    told = f"gaps p50 {1000 * cuts[49]:.1f}, p99 {1000 * cuts[98]:.1f} ms"
    return f"{told}; /health {1000 * median(waits):.1f} ms, at most {1000 * waits[-1]:.0f}"


def resident(server: Server) -> float:
    """The MiB of memory that the API process has."""
    [kib] = re.findall(r"VmRSS:\s*(\d+)", Path(f"/proc/{server.http_pid}/status").read_text())
    return int(kib) / 1024


def large(folder: Path, asked: argparse.Namespace) -> None:
    with closing(
        serve(folder, "--mm-processor-cache-gb", "0.001", "--max-model-len", str(_LONGEST))
    ) as server:
        pages, seconds = Pages(1600, 1200), list[float]()
        for _ in range(20):
            body = {"messages": [{"role": "user", "content": [pages.part()]}]}
            started = time.perf_counter()
            httpx.post(server.url + "/tokenize", json=body).raise_for_status()
            seconds.append(1000 * (time.perf_counter() - started))
        print(f"1600 x 1200: {median(seconds):.0f} ms from the body to its tokens", flush=True)
        for clients in (0, asked.clients, 0, asked.clients):
            told = asyncio.run(large_pictures(server, clients, asked.seconds / 4))
            print(f"{clients} clients with large pictures: {told}", flush=True)
        if asked.pictures:
            small, before = Pages(320, 240), resident(server)
            for _ in range(asked.pictures):
                body = {"messages": [{"role": "user", "content": [small.part()]}], "max_tokens": 1}
                httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).raise_for_status()
            print(f"after {asked.pictures} pictures: {resident(server) - before:+.1f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["rerank", "stream", "start", "text", "large"])
    parser.add_argument("--shape", choices=list(_SHAPES), help="small; tiny for a stream")
    parser.add_argument("--pages", type=int, default=100)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--clients", type=int, help="72; 8 for large pictures")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--pictures", type=int, default=0)
    asked = parser.parse_args()
    asked.clients = asked.clients or (8 if asked.what == "large" else 72)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        if asked.what == "large":
            config = LLAVA["text_config"] | {"max_position_embeddings": _LONGEST}
            write_llava(folder, text_config=config)
        else:
            write_model(folder, asked.shape or ("tiny" if asked.what == "stream" else "small"))
        parts = {"rerank": rerank, "stream": stream, "start": start, "text": text, "large": large}
        parts[asked.what](folder, asked)


if __name__ == "__main__":
    main()
