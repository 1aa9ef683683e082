"""Whisper in a whole engine: the logits of transformers, however steps fall and sources come together."""

import json
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from sizes import engine_config
from sourced import Found, answer_all
from tiny_whisper import END, FIRST_STAMP, IDS, make

from engine_core.engine import Engine
from engine_core.protocol import AddRequest, Failed, Pooled, Source
from engine_core.scheduling.planned_step import StepBuilder
from server.speech.words import token_times
from worker.buffers import Buffer
from worker.features.media.step_sources import StepSources
from worker.protocol import Pooling, Sampling, StepInput, Timestamps

OUTPUT = 8
SOUNDS = [np.random.default_rng(seed).normal(size=(80, 3000)).astype(np.float32) for seed in range(3)]
PROMPTS = [[5, 6, 7], [9] * 30, [5, 6, 7, 8], list(range(40, 60)), [5, 6], [7]]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("whisper")
    return folder, make(folder)


def asked(id: int, **changes: Any) -> AddRequest:
    sound = id % len(SOUNDS)
    source = Source(f"{sound}", 1500, features=Buffer(SOUNDS[sound].tobytes()))
    params = Sampling(max_tokens=OUTPUT, temperature=0, logprobs=0)
    return AddRequest(id=id, tokens=PROMPTS[id % len(PROMPTS)], params=params, source=source, **changes)


@torch.inference_mode()
def check(model: Any, requests: list[AddRequest], found: Found) -> None:
    """Assert that tokens are the likeliest of transformers' model, and logprobs its own."""
    for each in requests:
        tokens, logprobs = found[each.id]
        features = torch.tensor(SOUNDS[each.id % len(SOUNDS)])[None]
        logits = model(features, decoder_input_ids=torch.tensor([each.tokens + tokens])).logits[0]
        theirs = logits[len(each.tokens) - 1 : -1].log_softmax(-1)
        assert theirs.argmax(-1).tolist() == tokens
        wanted = theirs.gather(1, torch.tensor(tokens).unsqueeze(1)).flatten().tolist()
        assert logprobs == pytest.approx(wanted, abs=1e-4)


def test_logits_are_those_of_transformers_and_each_source_is_encoded_once(whisper: tuple[Path, Any]) -> None:
    folder, model = whisper
    requests = [asked(id) for id in range(12)]
    found, engine = answer_all(folder, requests)
    check(model, requests, found)
    assert engine.stats().media_encoded == 3
    alone, _ = answer_all(folder, [requests[1]])
    assert alone[1] == found[1], "bits depend on what else is in a step"


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7, "max_num_seqs": 7, "steps_ahead": 0},  # chunks
        {"num_gpu_blocks_override": 4, "steps_ahead": 2},  # room for a single source, and for one sequence
        {"num_gpu_blocks_override": 8, "scheduling_policy": "priority"},  # preemption of both kinds of blocks
    ],
)
def test_chunks_preemption_and_a_pool_of_one_source_change_no_bit(
    whisper: tuple[Path, Any], options: dict[str, Any]
) -> None:
    folder, _ = whisper
    expected, _ = answer_all(folder, [asked(id) for id in range(6)])
    requests = [asked(id, priority=-id) for id in range(6)]
    found, engine = answer_all(folder, requests, 1, **options)
    assert found == expected
    if "scheduling_policy" in options:
        assert engine.stats().preemptions
    if options.get("num_gpu_blocks_override") == 4:
        assert engine.ready.worker.num_source_blocks == 94


def test_an_encoder_that_pauses_behind_each_layer_gives_the_same_bits(
    whisper: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = whisper
    requests = [asked(id) for id in range(3)]
    expected, _ = answer_all(folder, requests)
    layers, update = list[int](), StepSources.update

    def noted(self: StepSources, step: StepInput) -> None:
        layers.append(step.source_layers)
        update(self, step)

    monkeypatch.setattr(StepSources, "update", noted)
    monkeypatch.setattr(StepBuilder, "fitting", property(lambda step: 1.0 if step.rows else inf))
    found, engine = answer_all(folder, requests, 1)
    assert found == expected and engine.ready.worker.source_layers == 2
    assert layers == [0, 1, 1, 1, 1], "one whole, since nobody waited, and two layer by layer"


@pytest.mark.parametrize("stamped", [True, False])
def test_rules_of_speech_leave_what_transformers_leaves(whisper: tuple[Path, Any], *, stamped: bool) -> None:
    folder, model = whisper
    given = model.generation_config
    rules = Timestamps(FIRST_STAMP, END, IDS["<|notimestamps|>"], 50) if stamped else None
    params = Sampling(
        max_tokens=24,
        temperature=0,
        logprobs=0,
        logprobs_mode="masked_logprobs",
        told=(IDS["<|nospeech|>"], 7),
        suppressed=tuple(given.suppress_tokens),
        suppressed_first=tuple(given.begin_suppress_tokens),
        timestamps=rules,
        stop_token_ids=(END,),
    )
    prompt = [IDS["<|startoftranscript|>"], IDS["<|en|>"], IDS["<|transcribe|>"]]
    prompt += [] if stamped else [IDS["<|notimestamps|>"]]
    request = replace(asked(0), tokens=prompt, params=params)
    told: list[list[float]] = []
    found, _ = answer_all(folder, [request], told=told)
    features = torch.tensor(SOUNDS[0])[None]
    with torch.inference_mode():
        theirs = model.generate(
            features, return_timestamps=stamped, language="en", task="transcribe", max_new_tokens=24
        )[0].tolist()
        logits = model(features, decoder_input_ids=torch.tensor([prompt])).logits[0, -1]
    logits = logits.clone()
    ours, logprobs = found[0]
    text = theirs[len(prompt) :] if theirs[: len(prompt)] == prompt else theirs
    assert ours[:16] == text[:16], "with timestamps, theirs goes on behind the last closed segment"
    assert told[0] == pytest.approx(logits.log_softmax(-1)[[IDS["<|nospeech|>"], 7]].tolist(), abs=1e-4)
    banned = [*given.suppress_tokens, *given.begin_suppress_tokens, IDS["<|notimestamps|>"]]
    logits[banned] = -torch.inf
    if stamped:
        logits[:FIRST_STAMP] = logits[FIRST_STAMP + 51 :] = -torch.inf
        assert logprobs[0] == pytest.approx(logits.log_softmax(-1)[ours[0]].item(), abs=1e-4)


COLUMNS = (1500, 371, 3)


@torch.inference_mode()
def times_of(model: Any, request: AddRequest) -> list[float]:
    """The times of a request's tokens but the first ones, by transformers."""
    from transformers.utils.generic import ModelOutput

    params = request.params
    assert isinstance(params, Pooling)
    found = model(
        torch.tensor(SOUNDS[request.id % len(SOUNDS)])[None],
        decoder_input_ids=torch.tensor([request.tokens]),
        output_attentions=True,
    )
    sequences = torch.tensor([request.tokens])
    outputs = ModelOutput(cross_attentions=[found.cross_attentions], sequences=sequences)
    heads = model.generation_config.alignment_heads
    times = model._extract_token_timestamps(outputs, heads, num_frames=2 * params.columns, num_input_ids=0)
    return times[0, :-1].tolist()


def align(folder: Path, requests: list[AddRequest], **options: Any) -> dict[int, np.ndarray]:
    sizes = {"block_size": 16, "num_gpu_blocks_override": 32, "max_num_batched_tokens": 64, **options}
    engine = Engine.start(engine_config(folder, cpu_threads=1, **sizes), lambda _: None)
    found = dict[int, np.ndarray]()
    for each in requests:
        engine.add(0, each)
    while engine.busy:
        for answer in engine.step().get(0, []):
            assert not isinstance(answer, Failed), answer
            if isinstance(answer, Pooled):
                vectors = answer.vectors
                found[answer.id] = np.frombuffer(vectors.data, np.float32).reshape(vectors.shape)
    assert engine.stats().media_encoded == len({each.source.hash for each in requests if each.source})
    engine.stop()
    return found


def test_times_of_tokens_are_those_of_transformers(whisper: tuple[Path, Any]) -> None:
    folder, model = whisper
    model.set_attn_implementation("eager")
    tokens = [np.random.default_rng(id).integers(300, size=23 + 9 * id).tolist() for id in range(4)]
    columns = [COLUMNS[id % len(COLUMNS)] for id in range(4)]
    requests = [
        replace(asked(id), tokens=tokens[id], params=Pooling(task="align", columns=columns[id]))
        for id in range(4)
    ]
    texts = [asked(10), asked(11)]  # which are answered in the same steps
    found = align(folder, [*requests, *texts])
    for each in requests:
        assert token_times(found[each.id]).tolist() == pytest.approx(times_of(model, each))
    again = replace(requests[3], id=5, params=replace(requests[3].params, skip=4))
    alone = align(folder, [requests[3], again], max_num_batched_tokens=7, enable_prefix_caching=True)
    assert alone[3].tobytes() == found[3].tobytes(), "bits depend on what else is in a step"
    assert alone[5].tobytes() == found[3][4:].tobytes(), "a prefix that is cached tells nothing of its tokens"


def test_heads_that_are_not_named_are_those_of_later_layers(whisper: tuple[Path, Any]) -> None:
    folder, _ = whisper
    path = folder / "generation_config.json"
    named = path.read_text()
    request = replace(asked(0), params=Pooling(task="align", columns=700))
    try:
        given = json.loads(named)
        del given["alignment_heads"]
        path.write_text(json.dumps(given))
        default = align(folder, [request])[0]
        path.write_text(json.dumps({**given, "alignment_heads": [[1, head] for head in range(4)]}))
        assert align(folder, [request])[0].tobytes() == default.tobytes()
        path.write_text(json.dumps({**given, "alignment_heads": [[2, 0]]}))
        with pytest.raises(ValueError, match="head 0 of layer 2"):
            align(folder, [request])
    finally:
        path.write_text(named)


def test_two_ranks_give_the_bits_of_one(whisper: tuple[Path, Any]) -> None:
    folder, _ = whisper
    texts = [asked(id) for id in range(3)]
    aligned = [replace(each, params=Pooling(task="align", columns=300)) for each in texts]
    alone, cut = (answer_all(folder, texts, tensor_parallel_size=ranks)[0] for ranks in (1, 2))
    assert cut == alone
    one, two = (align(folder, aligned, tensor_parallel_size=ranks) for ranks in (1, 2))
    assert [two[id].tobytes() for id in range(3)] == [one[id].tobytes() for id in range(3)]
