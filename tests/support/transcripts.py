"""Transcripts: requests of all routes with the answers that they must get, as JSON lines in
tests/transcripts.

A line is a case. `ask` is the method and the path, `headers` and `body` are what is sent, and `status`,
`told` (headers that matter) and `answer` are what comes back: JSON, the text of anything else, or in
`events` what a stream says. `keep` names parts of the answer for later lines, which write them as `{name}`.
A body that says what no long one can is `short`. What differs from run to run (ids, times, hits of the
cache) stands as `#`; numbers that are computed may differ in their last digits.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

FOLDER = Path(__file__).parents[1] / "transcripts"

HEADERS = ("allow", "retry-after", "warning", "www-authenticate", "x-ratelimit-limit-requests", "metadata")
"""The headers of answers that clients read, beside the content type."""

TIMES = (
    "server-timing",
    *(f"x-facet-{part}" for part in ("expected-first-token-ms", "queue-ms", "prefill-ms", "decode-ms")),
    "x-facet-cached-tokens",
)
"""Headers of answers that tell times, compared where a transcript says what times the engine took."""

ANSWERING = ("status", "told", "answer", "events", "asked", "checked")
"""The fields of a case that hold its answer."""

Case = dict[str, Any]

_ID = re.compile(r"(?<![0-9a-zA-Z])([a-z]+[_-])?([0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{16,64})(?![0-9a-zA-Z])")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(Z|[+-]\d\d:\d\d)?")
_OWN_TIME = re.compile(r"((?:tokenize|answer|total);dur)=-?[\d.]+")
_VOLATILE = re.compile(
    r"created|\w+_at|\w+_duration|elapsed_s|e2e_latency|\w*fingerprint|memory|root|server_load|size\w*"
    r"|version|(tokenize|answer|total)_ms"
)
"""Fields whose values say when and where a request ran."""
_OF_A_SERVER = re.compile(
    _VOLATILE.pattern + r"|cached_tokens|cache_\w+_tokens|input_tokens|retry-after|sequence_number"
)
"""The same for a real server, which other tests may have asked, too."""
_GROWING = frozenset(
    {
        *("arguments", "content", "delta", "input", "partial_json", "reasoning", "reasoning_content"),
        *("response", "text", "thinking", "token_ids", "tokens"),
        *("logprobs", "text_offset", "token_logprobs", "top_logprobs"),
    }
)
"""Fields of a stream's events that hold a piece of something: two such events say what one may say."""


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.jsonl"))


def read(name: str) -> list[Case]:
    """Returns the cases of a file in tests/transcripts."""
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def write(name: str, cases: list[Case]) -> None:
    lines = (json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in cases)
    (FOLDER / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def request_of(case: Case, kept: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments of httpx's request: a `body` goes as JSON, `raw` as it is, a `form` in parts."""
    method, path = _filled(case["ask"], kept).split(" ")
    headers = {"content-type": "application/json"} if "body" in case or "raw" in case else {}
    sent: dict[str, Any] = {"method": method, "url": path, "headers": headers | case.get("headers", {})}
    if "body" in case:
        sent["content"] = json.dumps(_filled(case["body"], kept), ensure_ascii=False).encode()
    elif "raw" in case:
        sent["content"] = _filled(case["raw"], kept).encode()
    elif "form" in case:
        sent["data"] = {name: value for name, value in case["form"].items() if name != "file"}
        sent["files"] = {"file": ("lines.jsonl", case["form"]["file"].encode())}
    return sent


def asking(case: Case) -> Case:
    """Returns a case without its answer."""
    return {name: value for name, value in case.items() if name not in ANSWERING}


def answer_of(case: Case, response: httpx.Response, *, live: bool) -> Case:
    """Returns what an answer says, without what differs from run to run, such as fields named in `volatile`.

    `live`: a real server gave it. Then events of a stream that follow each other are one where they only go
    on with the same: how many tokens come with one event depends on the machine.
    """
    plain = _Plain(live)
    kind = response.headers.get("content-type", "")
    names = (*HEADERS, *TIMES) if "timing" in case.get("engine", {}) else HEADERS
    told = {name: plain.of(response.headers[name], name) for name in names if name in response.headers}
    if "server-timing" in told:
        told["server-timing"] = _OWN_TIME.sub(r"\1=#", told["server-timing"])
    told |= {"metadata": plain.of(json.loads(response.headers["metadata"]))} if "metadata" in told else {}
    found: Case = {"status": response.status_code}
    if kind.startswith(("text/event-stream", "application/x-ndjson")):
        events = [plain.of(event) for event in _events(response.text, named=kind.startswith("text"))]
        found["events"] = _folded(events) if live else events
    elif kind.startswith("application/json"):
        found["answer"] = plain.of(response.json())
        for name in case.get("volatile", ()):
            found["answer"][name] = "#"
    else:
        lines = kind == "application/octet-stream"
        found["answer"] = plain.of(_lines(response.content) if lines else response.text)
    told |= {} if kind.startswith("application/json") else {"content-type": kind}
    return {**found, "told": told} if told else found


def _lines(content: bytes) -> Any:
    """Returns what a file says if it is lines of JSON, and else its bytes."""
    try:
        return [json.loads(line) for line in content.decode().splitlines()]
    except ValueError:
        return content.hex()


def keep(case: Case, response: httpx.Response, kept: dict[str, str]) -> None:
    """Remembers the parts of an answer that later requests need, by a path of dots from its top."""
    for name, path in case.get("keep", {}).items():
        value: Any = response.json()
        for key in path.split("."):
            value = value[int(key) if isinstance(value, list) else key]
        kept[name] = value


def changed(cases: Iterable[Case], answered: Iterable[Case]) -> list[str]:
    """Returns a line for each difference between transcripts and what is answered now."""
    pairs = zip(cases, answered, strict=True)
    return [f"{old['name']}{line}" for old, new in pairs for line in differences(old, new)]


def differences(wanted: object, found: object, where: str = "") -> Iterator[str]:
    """Yields a line for each place in which two answers differ. Floats may differ in their last digits."""
    if isinstance(wanted, float) and isinstance(found, int | float):
        if abs(wanted - found) > 1e-4 + 1e-4 * abs(wanted):
            yield f"{where}: {wanted} != {found}"
    elif isinstance(wanted, dict) and isinstance(found, dict):
        for key in {**wanted, **found}:
            if key not in wanted or key not in found:
                yield f"{where}.{key}: only in {'the answer' if key in found else 'the transcript'}"
            else:
                yield from differences(wanted[key], found[key], f"{where}.{key}")
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for index, pair in enumerate(zip(wanted, found, strict=True)):
            yield from differences(*pair, f"{where}[{index}]")
    elif wanted != found or isinstance(wanted, bool) != isinstance(found, bool):
        yield f"{where}: {json.dumps(wanted)[:500]} != {json.dumps(found)[:500]}"


def _filled(value: Any, kept: Mapping[str, str]) -> Any:
    """Writes what earlier answers said in the places of their names."""
    if isinstance(value, str):
        return re.sub(r"\{(\w+)\}", lambda match: kept.get(match[1], match[0]), value)
    if isinstance(value, dict):
        return {key: _filled(one, kept) for key, one in value.items()}
    return [_filled(one, kept) for one in value] if isinstance(value, list) else value


class _Plain:
    """Writes an answer without what differs from run to run: ids become `#1`, `#2` as they come."""

    def __init__(self, live: bool) -> None:
        self._hidden = _OF_A_SERVER if live else _VOLATILE
        self._ids: dict[str, str] = {}

    def of(self, value: Any, key: str = "") -> Any:
        """Returns a value as transcripts have it, with vectors in base64 as numbers."""
        if value is not None and self._hidden.fullmatch(key):
            return "#"
        if isinstance(value, dict):
            return {name: self.of(one, name) for name, one in value.items()}
        if isinstance(value, list):
            return [self.of(one) for one in value]
        if isinstance(value, float):
            return float(f"{value:.5g}")
        if not isinstance(value, str):
            return value
        raw = base64.b64decode(value) if key == "embedding" else b"-"
        if len(raw) % 4 == 0:
            return [self.of(one) for one in struct.unpack(f"<{len(raw) // 4}f", raw)]
        return _TIME.sub("#", _ID.sub(self._number, value))

    def _number(self, match: re.Match[str]) -> str:
        return (match[1] or "") + self._ids.setdefault(match[2], f"#{len(self._ids) + 1}")


def _events(text: str, *, named: bool) -> Iterator[Any]:
    """Yields the data of each event; that of a name that is not the type of its data comes with the name."""
    for block in text.strip("\n").split("\n\n" if named else "\n"):
        if not named:
            yield json.loads(block)
            continue
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        data = fields.pop("data", "")
        event = json.loads(data) if data.startswith(("{", "[{")) else data
        if fields and not (isinstance(event, dict) and fields == {"event": event.get("type")}):
            event = {**fields, "data": event}
        yield event


def _folded(events: list[Any]) -> list[Any]:
    """Joins the events that follow each other as pieces of the same, those of each choice by themselves."""
    found: list[Any] = []
    for event in sorted(events, key=_choice):
        joined = _join(found[-1], event, "") if found else _DIFFERS
        if joined is _DIFFERS:
            found.append(event)
        else:
            found[-1] = joined
    return found


def _choice(event: Any) -> int:
    """Returns the number of the choice that an event is about; that of an event about none is high."""
    choices = event.get("choices", [{}]) if isinstance(event, dict) else []
    return choices[0].get("index", 0) if len(choices) == 1 else 1 << 20


_DIFFERS = object()


def _join(first: Any, second: Any, key: str) -> Any:
    """Returns what two values say together; _DIFFERS if they are no pieces of the same."""
    if first is None or key == "usage" or (key == "done" and second is True):
        return second
    if key in _GROWING and isinstance(first, str) and isinstance(second, str):
        return first + second
    if key in _GROWING and isinstance(first, list) and isinstance(second, list):
        return [*first, *second]
    if isinstance(first, dict) and isinstance(second, dict):
        common = {name: _join(first[name], second[name], name) for name in first if name in second}
        return _DIFFERS if _DIFFERS in common.values() else first | second | common
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        joined = [_join(one, other, "") for one, other in zip(first, second, strict=True)]
        return _DIFFERS if _DIFFERS in joined else joined
    return first if second is None or first == second else _DIFFERS
