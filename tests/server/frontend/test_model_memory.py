"""What models take of the machine's memory, and of a card's."""

import os

import pytest
from model_facts import WORKER
from msgspec.structs import replace

from engine_core.config import EngineConfig
from server.frontend import model_memory
from server.frontend.model_memory import CARD_OVERHEAD, OVERHEAD, CardMemory, HostMemory, open_memory
from server.options.parse_server_options import read
from worker.options import WorkerOptions

GIB = 1 << 30


def engine(tensor_parallel_size: int = 1, **worker: object) -> EngineConfig:
    given = WorkerOptions(**worker)  # pyright: ignore[reportArgumentType]
    return EngineConfig(model="m", tensor_parallel_size=tensor_parallel_size, worker=given)


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_memory, "total_memory", lambda: 64 * GIB)
    monkeypatch.setattr(model_memory, "card_memory", lambda: 80 * GIB)


def test_a_share_is_of_the_memory_in_which_models_are() -> None:
    def opened(*flags: str) -> model_memory.ModelMemory:
        return open_memory(read(["demo", "org/b", *flags], {}).read_models()[0].config)

    host, card = opened("--device", "cpu"), opened("--device", "cuda")
    assert (host.budget, host.most_cache_bytes) == (int(0.8 * 64 * GIB), 4 * GIB)
    assert (card.budget, card.most_cache_bytes) == (int(0.92 * 80 * GIB), int(0.92 * 80 * GIB) // 8)
    assert opened("--device", "cuda", "--memory", "50%").budget == 40 * GIB
    small = opened("--device", "cpu", "--memory", "2.5G")
    assert (small.budget, small.most_cache_bytes) == (5 * GIB // 2, 5 * GIB // 16)


def test_files_and_options_tell_what_a_model_will_take() -> None:
    host, card = HostMemory(16 * GIB), CardMemory(40 * GIB)

    def both(given: EngineConfig, replicas: int = 1, filled: int = 900 * GIB) -> tuple[int, int]:
        of_host = host.estimate(8 * GIB, given, replicas=replicas, filled=filled)
        return of_host, card.estimate(8 * GIB, given, replicas=replicas, filled=filled)

    assert both(engine(), filled=GIB) == (9 * GIB + OVERHEAD, 9 * GIB + CARD_OVERHEAD)
    assert both(engine(), filled=0) == (8 * GIB + OVERHEAD, 8 * GIB + CARD_OVERHEAD)
    assert both(engine()) == (10 * GIB + OVERHEAD, 13 * GIB + CARD_OVERHEAD)
    asked = engine(kv_cache_memory_bytes=GIB)
    assert both(asked) == (9 * GIB + OVERHEAD, 9 * GIB + CARD_OVERHEAD)
    # Each worker has a card, each replica cards of its own; all are on one machine.
    assert both(engine(2)) == (10 * GIB + 2 * OVERHEAD, 9 * GIB + CARD_OVERHEAD)
    asked = engine(2, kv_cache_memory_bytes=GIB)
    assert both(asked) == (10 * GIB + 2 * OVERHEAD, 5 * GIB + CARD_OVERHEAD)
    assert both(engine(), replicas=2) == (20 * GIB + 2 * OVERHEAD, 13 * GIB + CARD_OVERHEAD)
    assert both(engine(gpu_memory_utilization=0.25)) == (16 * GIB + OVERHEAD, 20 * GIB)


def test_what_a_loaded_model_takes_is_measured_or_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_memory, "own_memory", lambda pid: pid * GIB)
    below = {os.getppid(): [3, 4, 5, 9], 3: [5]}
    monkeypatch.setattr(model_memory, "descendants", lambda pid: below.get(pid, []))
    facts = replace(WORKER, weight_bytes=2 * GIB, kv_bytes=8 * GIB, device_bytes=20 * GIB)
    host, card = HostMemory(16 * GIB), CardMemory(40 * GIB)
    assert host.of_loaded(facts, engine(), 1, [3]) == (3 + 5 + 7) * GIB, "with a rank, and its cache"
    assert host.of_loaded(facts, engine(), 2, [3, 4]) == 2 * (10 * GIB + OVERHEAD), "one loads still"
    assert host.of_loaded(facts, engine(), 1, []) == 10 * GIB + OVERHEAD
    assert host.measure([[3], [4]]) == ((os.getppid() + 9) * GIB, [8 * GIB, 4 * GIB])
    assert card.of_loaded(facts, engine(), 2, [3, 4]) == 20 * GIB
    assert card.measure([[3], [4]]) == (0, [0, 0])
