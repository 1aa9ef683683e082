"""Calls with bare keys and strings between markers: `call:f{k:<|"|>v<|"|>,n:42}`, as Gemma writes them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from server.answers.calls import MAX_NAME, Calls
from server.answers.source import SPACE, Literals, Reading

_MOST_DEPTH = 32
_SCALAR_ENDS = Literals([",", "}", "]"])


@dataclass(frozen=True, slots=True)
class BareKeys:
    quote: str
    """The marker at both ends of a string."""
    closes: tuple[str, ...]
    """What ends a call."""

    def read(self, calls: Calls, opener: str) -> Reading[None]:
        source = calls.source
        if not (yield from source.expect("call:")):
            return
        found = yield from source.read_until(Literals(["{"]), MAX_NAME)
        if found is None or not calls.begin(found[0].strip(SPACE)):
            return
        source.give_back("{")
        if (yield from self._read_value(calls, 0)):
            calls.end()
            yield from source.expect(*self.closes)

    def _read_value(self, calls: Calls, depth: int) -> Reading[bool]:
        """Pass a value on as JSON; False if the answer ends in it, or it is too deep."""
        source = calls.source
        match (yield from source.expect(self.quote, "{", "[")):
            case "{":
                return depth < _MOST_DEPTH and (yield from self._read_members(calls, depth, "{", "}"))
            case "[":
                return depth < _MOST_DEPTH and (yield from self._read_members(calls, depth, "[", "]"))
            case None:
                return (yield from self._read_scalar(calls))
            case _:
                calls.argue('"')
                end = yield from source.pass_until(Literals([self.quote]), calls.argue_string, in_markup=True)
                calls.argue('"' if end else "")
                return end is not None

    def _read_members(self, calls: Calls, depth: int, opens: str, closes: str) -> Reading[bool]:
        """Pass the members of an object or the elements of a list on."""
        source = calls.source
        calls.argue(opens)
        count = 0
        while not (yield from source.expect(closes)):
            if source.ended and not source.text.strip():
                return False
            if count:
                yield from source.expect(",")
                calls.argue(", ")
            count += 1
            if opens == "{":
                key = yield from source.read_until(Literals([":"]), MAX_NAME)
                if key is None:
                    return False
                calls.argue(json.dumps(key[0].strip(SPACE).replace(self.quote, "")) + ": ")
            if not (yield from self._read_value(calls, depth + 1)):
                return False
        calls.argue(closes)
        return True

    def _read_scalar(self, calls: Calls) -> Reading[bool]:
        found = yield from calls.source.read_until(_SCALAR_ENDS, MAX_NAME)
        if found is None:
            return False
        calls.source.give_back(found[1])
        text = found[0].strip(SPACE)
        try:
            calls.argue(json.dumps(json.loads(text)))
        except (ValueError, RecursionError):
            calls.argue(json.dumps(text, ensure_ascii=False))
        return bool(text)
