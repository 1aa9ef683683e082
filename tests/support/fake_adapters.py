"""Adapters of a worker without tensors: what one computes depends on its file, and on where it begins."""

import json
from dataclasses import dataclass
from pathlib import Path

from fake_cache import entries_of, sum_up

from engine_core.adapters.adapter_files import stamp_of
from engine_core.adapters.messages import Adapter
from models.lora_config import CONFIG_FILE, TENSORS_FILE, adapter_digest
from worker.calls.messages import (
    DROP_ADAPTER,
    ENTER_ADAPTER,
    READ_ADAPTER,
    AdapterFacts,
    WorkerCall,
    WorkerReturn,
)

_VOCAB = 50


def write_adapter(folder: Path, shift: int) -> Path:
    """Files of an adapter that adds `shift` to each token: no worker but this one can read them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text("{}")
    (folder / TENSORS_FILE).write_text(json.dumps(shift))
    return folder


def adapter(folder: Path, name: str = "", *, invocation: tuple[int, ...] = ()) -> Adapter:
    return Adapter(
        name=name or folder.name,
        digest=adapter_digest(folder),
        folder=str(folder),
        stamp=stamp_of(folder),
        root=str(folder),
        invocation=invocation,
    )


def adapted_reference(prompt: list[int], max_tokens: int, shift: int, since: int = 0) -> list[int]:
    """The tokens that a request must produce whose adapter adds `shift` from position `since` on."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        seen = [token + (shift if at >= since else 0) for at, token in enumerate(tokens)]
        tokens.append(sum_up(entries_of(seen)) % _VOCAB)
    return tokens[len(prompt) :]


@dataclass(slots=True)
class CalledBefore:
    """What came of a call that ran at once."""

    returns: list[WorkerReturn]
    is_done: bool = True

    def done(self) -> bool:
        return self.is_done

    def result(self) -> list[WorkerReturn]:
        self.is_done = True
        return self.returns


class FakeAdapters:
    def __init__(self, most: int = 1 << 30) -> None:
        self.shifts: dict[int, int] = {}
        """Number -> what the adapter adds to each token."""
        self.loaded: list[str] = []
        """The folders that were loaded, in their order."""
        self._most = most
        self._read: dict[int, int] = {}

    def call(self, call: WorkerCall) -> WorkerReturn:
        number = call.args[0]
        if call.method == DROP_ADAPTER:
            self._read.pop(number, None)
            self.shifts.pop(number, None)
            return WorkerReturn(call.number)
        if call.method == ENTER_ADAPTER:
            self.shifts[number] = self._read.pop(number)
            return WorkerReturn(call.number)
        assert call.method == READ_ADAPTER
        folder = Path(call.args[1])
        if (folder / "unfit").exists():
            return WorkerReturn(call.number, error="q_proj has no place")
        assert len({*self.shifts, number}) <= self._most, "there is no place for another adapter"
        self._read[number] = json.loads((folder / TENSORS_FILE).read_text())
        self.loaded.append(folder.name)
        return WorkerReturn(call.number, AdapterFacts(bytes=100))
