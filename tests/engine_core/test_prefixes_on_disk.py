"""Real models whose prefixes are kept on disk: another engine finds them, and gives the same bits."""

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
from bits_traffic import Result, answers
from sizes import engine_config
from tiny import VOCAB_SIZE, tiny_checkpoint

from engine_core.engine import Engine
from engine_core.protocol import AddRequest
from worker.protocol import DiskTotals, Pooling, Sampling

TEXT = [5 + number * number % (VOCAB_SIZE - 5) for number in range(400)]
SIZES = {"device": "cpu", "cpu_threads": 1, "block_size": 16, "max_model_len": 512}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disk") / "llama"
    return tiny_checkpoint("LlamaForCausalLM", folder, max_position_embeddings=512)


@dataclass
class Served:
    """What an engine said of a request, and of its disk."""

    result: Result
    hits: int
    disk: DiskTotals | None


def serve(folder: Path, kept: Path, params: Sampling | Pooling, **options: object) -> Served:
    """Answer one request in an engine of its own, which is stopped as it should be."""
    engine = Engine.start(
        engine_config(folder, **SIZES, kv_cache_dir=str(kept), num_gpu_blocks_override=100, **options),
        lambda _: None,
    )
    try:
        text = TEXT if engine.ready.worker.remembered_states is None else TEXT[:395]
        [result] = answers(engine, [AddRequest(1, text, params)]).values()
        stats = engine.stats()
        return Served(result, stats.prefix_hits, stats.disk)
    finally:
        engine.stop()


LIKELIEST = Sampling(max_tokens=8, temperature=0, logprobs=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_the_same_bits_after_a_restart(llama: Path, tmp_path: Path, dtype: str) -> None:
    first, second = (serve(llama, tmp_path, LIKELIEST, dtype=dtype) for _ in range(2))
    assert first.result == second.result
    assert (first.hits, second.hits) == (0, 384)
    assert second.disk is not None
    assert (second.disk.read, second.disk.written, second.disk.failures) == (24, 0, 0)


def test_prefixes_of_layers_with_windows_are_found(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    changes = {"num_hidden_layers": 6, "layer_types": kinds, "sliding_window": 24}
    folder = tmp_path / "gemma"
    tiny_checkpoint("Gemma3ForCausalLM", folder, **changes, max_position_embeddings=512)
    first, second = (serve(folder, tmp_path / "kept", LIKELIEST) for _ in range(2))
    assert first.result == second.result
    assert (first.hits, second.hits) == (0, 384)
    assert second.disk is not None and 24 < second.disk.read < 3 * 24


def test_vectors_of_a_whole_text_need_its_hidden_states(llama: Path, tmp_path: Path) -> None:
    mean = {"pooler_config": {"pooling_type": "MEAN"}, "runner": "pooling", "convert": "embed"}
    first, second = (serve(llama, tmp_path, Pooling("embed"), **mean) for _ in range(2))
    assert first.result == second.result and first.result.vectors is not None
    assert (first.hits, second.hits) == (0, 384)


def test_an_engine_that_slept_finds_its_prefixes(llama: Path, tmp_path: Path) -> None:
    config = engine_config(llama, **SIZES, kv_cache_dir=str(tmp_path), num_gpu_blocks_override=100)
    engine = Engine.start(config, lambda _: None)
    try:
        first = answers(engine, [AddRequest(1, TEXT, LIKELIEST)])[1]
        engine.fall_asleep()
        engine.wake()
        again = answers(engine, [AddRequest(2, TEXT, LIKELIEST)])[2]
        assert again == first and engine.stats().prefix_hits == 384
    finally:
        engine.stop()


def test_other_options_find_nothing(llama: Path, tmp_path: Path) -> None:
    serve(llama, tmp_path, LIKELIEST, dtype="float32")
    for options in ({"dtype": "bfloat16"}, {"hf_overrides": {"rope_theta": 5e5}}):
        assert serve(llama, tmp_path, LIKELIEST, **{"dtype": "float32", **options}).hits == 0


def test_files_of_a_disk_that_lies_change_no_answer(llama: Path, tmp_path: Path) -> None:
    expected = serve(llama, tmp_path / "right", LIKELIEST).result
    serve(llama, tmp_path, LIKELIEST)
    for number, path in enumerate(sorted(tmp_path.glob("facet-*/*/*.blocks"))):
        data = bytearray(path.read_bytes())
        data[(len(data) // 2 + number) % len(data)] ^= 1
        path.write_bytes(data)
    damaged = serve(llama, tmp_path, LIKELIEST)
    assert damaged.result == expected
    assert damaged.disk is not None and damaged.disk.failures


def test_a_folder_that_cannot_be_used_is_told_and_done_without(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    served = serve(llama, file, LIKELIEST)
    assert served.disk is None and len(served.result.tokens) == 8
    assert "nothing is kept on disk, because" in caplog.text


def test_the_start_tells_what_is_there(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    serve(llama, tmp_path, LIKELIEST, kv_cache_disk_gib=2.5)
    assert "0.00 of 2.5 GiB in use, blocks of 0 tokens of this model" in caplog.text
    serve(llama, tmp_path, LIKELIEST)
    assert "of 10 GiB in use, blocks of 400 tokens of this model" in caplog.text


@pytest.mark.parametrize("name", ["Qwen3_5ForCausalLM", "BambaForCausalLM"])
def test_states_of_hybrids_are_found(name: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(name, tmp_path / "hybrid", max_position_embeddings=512)
    first, second = (serve(folder, tmp_path / "kept", LIKELIEST) for _ in range(2))
    assert first.result == second.result
    assert (first.hits, second.hits) == (0, 384)
    assert second.disk is not None and (second.disk.read, second.disk.failures) == (24, 0)
    files = sorted((tmp_path / "kept").glob("facet-*/*/*.blocks"))
    assert len({path.parent for path in files}) == 2
    states = min((path.parent for path in files), key=lambda each: len(list(each.iterdir())))
    for path in files:
        if path.parent == states:
            path.write_bytes(path.read_bytes()[:-1])
    damaged = serve(folder, tmp_path / "kept", LIKELIEST)
    assert damaged.result == first.result and damaged.hits == 0
    assert damaged.disk is not None and damaged.disk.failures


def test_what_a_hybrid_cannot_keep_it_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_checkpoint("Mamba2ForCausalLM", tmp_path / "mamba", max_position_embeddings=512)
    assert serve(folder, tmp_path / "kept", LIKELIEST).disk is None
    assert "nothing is kept on disk, because no layer of the model has keys and values" in caplog.text
    folder = tiny_checkpoint("Qwen3_5ForCausalLM", tmp_path / "hybrid", max_position_embeddings=512)
    assert serve(folder, tmp_path / "kept", LIKELIEST, state_snapshots=0).disk is None
    assert "no memory is left to remember some" in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_cache_dir": "x", "enable_prefix_caching": False}, "leave out one of them"),
        ({"kv_cache_disk_gib": 3}, "give that, too"),
    ],
)
def test_options_that_contradict_it_are_refused(llama: Path, options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Engine.start(engine_config(llama, **options), lambda _: None)
