"""Real models that save blocks in the host's memory before they are forgotten, with a stand-in for a card."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bits_traffic import Result, answers
from sizes import engine_config
from tiny import VOCAB_SIZE, tiny_checkpoint

from engine_core.engine import Engine
from engine_core.protocol import AddRequest
from models import ops
from worker import runner
from worker.devices.cpu import Cpu
from worker.protocol import Pooling, Sampling

TEXT = [5 + number * number % (VOCAB_SIZE - 5) for number in range(395)]
OTHERS = [[5 + (number * number + 7 * at) % (VOCAB_SIZE - 5) for number in range(395)] for at in range(1, 5)]
SIZES = {"cpu_threads": 1, "block_size": 16, "max_model_len": 512, "max_num_seqs": 2}
LIKELIEST = Sampling(max_tokens=8, temperature=0, logprobs=3)


@pytest.fixture(autouse=True)
def _a_card_in_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    def open_device(_: object) -> Cpu:
        device = Cpu(1)
        ops.use(device.kernels)
        return device

    monkeypatch.setattr(runner, "open_device", open_device)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("host") / "llama"
    return tiny_checkpoint("LlamaForCausalLM", folder, max_position_embeddings=512)


@contextmanager
def serving(folder: Path, blocks: int = 40, gib: float = 0.01, **options: object) -> Generator[Engine]:
    sizes = {**SIZES, "num_gpu_blocks_override": blocks, "kv_offloading_size": gib}
    engine = Engine.start(engine_config(folder, **sizes, **options), lambda _: None)
    try:
        yield engine
    finally:
        engine.stop()


def ask(engine: Engine, id: int, text: list[int], params: Sampling | Pooling = LIKELIEST) -> Result:
    [result] = answers(engine, [AddRequest(id, text, params)]).values()
    return result


def come_back(engine: Engine, params: Sampling | Pooling = LIKELIEST) -> None:
    """Ask, have it forgotten, and ask again: all full blocks come back, and the answer has the same bits."""
    first = ask(engine, 1, TEXT, params)
    for id, text in enumerate(OTHERS, 2):
        ask(engine, id, text, params)
    hits = engine.stats().prefix_hits
    assert ask(engine, 9, TEXT, params) == first
    stats = engine.stats()
    assert stats.prefix_hits - hits == 384 and stats.disk is None
    assert stats.host is not None and stats.host.read and not stats.host.failures
    assert stats.host.held <= 0.01 * (1 << 30)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_the_same_bits(llama: Path, dtype: str) -> None:
    with serving(llama, dtype=dtype) as engine:
        come_back(engine)


def test_what_layers_with_windows_need_comes_back(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    changes = {"num_hidden_layers": 6, "layer_types": kinds, "sliding_window": 24}
    folder = tiny_checkpoint("Gemma3ForCausalLM", tmp_path, **changes, max_position_embeddings=512)
    with serving(folder, blocks=110) as engine:
        come_back(engine)


def test_states_come_back_with_their_blocks(tmp_path: Path) -> None:
    folder = tiny_checkpoint("Qwen3_5ForCausalLM", tmp_path, max_position_embeddings=512)
    with serving(folder, state_snapshots=3) as engine:
        come_back(engine)


def test_hidden_states_come_back(llama: Path) -> None:
    mean = {"pooler_config": {"pooling_type": "MEAN"}, "runner": "pooling", "convert": "embed"}
    with serving(llama, **mean) as engine:
        come_back(engine, Pooling("embed"))


def test_sleep_and_a_reset_empty_it(llama: Path) -> None:
    with serving(llama) as engine:
        first = ask(engine, 1, TEXT)
        for id, text in enumerate(OTHERS, 2):
            ask(engine, id, text)
        engine.reset_prefix_cache()
        hits = engine.stats().prefix_hits
        assert ask(engine, 7, TEXT) == first and engine.stats().prefix_hits == hits
        for id, text in enumerate(OTHERS, 8):
            ask(engine, id, text)
        engine.fall_asleep()
        engine.reset_prefix_cache()
        engine.wake()
        assert ask(engine, 20, TEXT) == first
        stats = engine.stats()
        assert stats.prefix_hits == 0 and stats.host is not None and not stats.host.read


def restart(folder: Path, files: Path, **options: object) -> None:
    """Ask, and ask an engine that was started again: the same bits, and nothing is computed twice."""
    with serving(folder, kv_cache_dir=str(files), **options) as engine:
        first = ask(engine, 1, TEXT)
        for id, text in enumerate(OTHERS, 2):
            ask(engine, id, text)
        assert engine.stats().host is None
    with serving(folder, kv_cache_dir=str(files), **options) as engine:
        assert ask(engine, 1, TEXT) == first
        stats = engine.stats()
        assert stats.disk is not None and stats.disk.read and not stats.disk.failures
        assert stats.prefix_hits == 384


def test_with_a_folder_they_outlive_the_engine(llama: Path, tmp_path: Path) -> None:
    restart(llama, tmp_path)


def test_states_outlive_the_engine(tmp_path: Path) -> None:
    folder = tiny_checkpoint("Qwen3_5ForCausalLM", tmp_path / "hybrid", max_position_embeddings=512)
    restart(folder, tmp_path / "files", state_snapshots=3)


def test_without_the_folder_memory_is_kept(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    with serving(llama, kv_cache_dir=str(file)) as engine:
        come_back(engine)
    assert "nothing is kept on disk, because" in caplog.text


def test_with_a_folder_a_reset_removes_them(llama: Path, tmp_path: Path) -> None:
    with serving(llama, kv_cache_dir=str(tmp_path)) as engine:
        ask(engine, 1, TEXT)
        engine.fall_asleep()
        engine.reset_prefix_cache()
        engine.wake()
        ask(engine, 2, TEXT)
        assert engine.stats().prefix_hits == 0


def test_memory_that_is_not_there_is_refused(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"takes 1000000.00 GiB of this machine's memory, and .* lower it"):
        Engine.start(engine_config(llama, **SIZES, kv_offloading_size=1e6), lambda _: None)
    with serving(llama, gib=1e-6) as engine:
        assert engine.stats().host is None
    assert "are less than two blocks" in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enable_prefix_caching": False}, "--kv-offloading-size keeps what --no-enable-prefix-caching"),
    ],
)
def test_options_that_contradict_it_are_refused(llama: Path, options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Engine.start(engine_config(llama, kv_offloading_size=1, **options), lambda _: None)
