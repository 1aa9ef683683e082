"""An engine with adapters, whose worker shows by its tokens which of them computed what."""

from pathlib import Path
from typing import Any

from driven import text
from fake_adapters import CalledBefore, adapter, write_adapter
from fake_worker import FakeExecutor
from sizes import engine_config

from engine_core.adapters.messages import Adapter, AdapterState
from engine_core.engine import Engine
from engine_core.features.adapters.adapter_table import AdapterTable
from engine_core.protocol import AddRequest, Failed, Output, Tokens
from worker.calls.messages import WorkerCall
from worker.protocol import Sampling

PROMPT = list(range(1, 14))


class AdaptedExecutor(FakeExecutor):
    """Keeps its calls, which may be held back."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.calls: list[CalledBefore] = []
        self.holds = False

    def call(self, call: WorkerCall) -> CalledBefore:
        returned = super().call(call)
        returned.is_done = not self.holds
        self.calls.append(returned)
        return returned


class Bench:
    """An engine with adapters, and what it has told."""

    def __init__(self, model: Path, folder: Path, **options: object) -> None:
        made: list[AdaptedExecutor] = []

        def make(*given: Any) -> AdaptedExecutor:
            made.append(AdaptedExecutor(*given))
            return made[-1]

        self.engine = Engine.start(engine_config(model, enable_lora=True, **options), lambda _: None, make)
        self.executor, self.folder = made[0], folder
        self.told: dict[int, list[Output]] = {}
        self.states: list[AdapterState] = []

    @property
    def table(self) -> AdapterTable:
        assert self.engine.intake.adapters is not None
        return self.engine.intake.adapters

    @property
    def loaded(self) -> list[str]:
        return self.executor._worker.adapters.loaded  # pyright: ignore[reportPrivateUsage]

    def adapter(self, name: str, shift: int, **changes: Any) -> Adapter:
        return adapter(write_adapter(self.folder / name, shift), **changes)

    def load(self, *adapters: Adapter) -> None:
        for each in adapters:
            self.table.load(each)
        self.run()

    def add(self, id: int, by: Adapter | None, tokens: list[int] = PROMPT, most: int = 4, **of: Any) -> None:
        digest = "" if by is None else by.digest
        self.engine.add(
            0, AddRequest(id=id, tokens=tokens, params=Sampling(max_tokens=most), adapter=digest, **of)
        )

    def step(self) -> None:
        for output in self.engine.step(wait=False).get(0, []):
            self.told.setdefault(output.id, []).append(output)
        self.states += self.table.take_states()

    def run(self) -> None:
        while self.engine.busy:
            self.step()

    def text(self, id: int) -> list[int]:
        [last] = [each for each in self.told[id] if isinstance(each, Failed) or each.finish]  # pyright: ignore[reportAttributeAccessIssue]
        assert isinstance(last, Tokens)
        return text(self.told[id])

    def cached(self, id: int) -> int:
        return next(each.cached for each in self.told[id] if isinstance(each, Tokens))
