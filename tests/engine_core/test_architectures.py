"""Every architecture through a whole engine: the tokens and logprobs of transformers, however steps fall."""

import json
import random
from pathlib import Path

import pytest
from sizes import engine_config
from tiny import ARCHITECTURES, hf_greedy, hf_logits, tiny_checkpoint

from engine_core.engine import Engine
from engine_core.protocol import AddRequest, Failed, Tokens
from worker.protocol import Sampling, TokenLogprobs

OUTPUT = 12
SHARED = [random.Random(0).randrange(5, 300) for _ in range(24)]


def prompts() -> list[list[int]]:
    """16 prompts of 1 to 45 tokens; every other one begins with the same 24 tokens."""
    rnd = random.Random(1)
    own = [[rnd.randrange(5, 300) for _ in range(rnd.randint(1, 20))] for _ in range(16)]
    return [SHARED + tokens if i % 2 else tokens for i, tokens in enumerate(own)]


def generate(
    folder: Path, asked: list[list[int]], **limits: object
) -> tuple[list[list[int]], list[list[TokenLogprobs]], Engine]:
    fields = {
        "max_model_len": 64,
        "block_size": 4,
        "num_gpu_blocks_override": 512,
        "cpu_threads": 1,
        **limits,
    }
    config = engine_config(folder, tasks=["generate"], **fields)
    engine = Engine.start(config, lambda _: None)
    params = Sampling(max_tokens=OUTPUT, temperature=0, logprobs=0)
    for i, tokens in enumerate(asked):
        engine.add(0, AddRequest(id=i, tokens=tokens, params=params))
    texts: list[list[int]] = [[] for _ in asked]
    logprobs: list[list[TokenLogprobs]] = [[] for _ in asked]
    while engine.busy:
        for answer in engine.step().get(0, []):
            if isinstance(answer, Failed):
                raise RuntimeError(answer.message)
            if isinstance(answer, Tokens):
                texts[answer.id] += answer.tokens
                logprobs[answer.id] += answer.logprobs
    engine.stop()
    return texts, logprobs, engine


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return hf_greedy(checkpoint, prompts(), OUTPUT)


def test_all_at_once(checkpoint: Path, expected: list[list[int]]) -> None:
    texts, logprobs, engine = generate(checkpoint, prompts(), max_num_seqs=16, max_token_gap_ms=0)
    assert texts == expected
    assert len({tuple(text) for text in expected}) > 8, "the model says the same to everyone"
    assert engine.stats().prefix_hits == 0, "all came at once: nothing could have been cached"
    for prompt, text, entries in list(zip(prompts(), texts, logprobs, strict=True))[:4]:
        theirs = hf_logits(checkpoint, prompt + text).log_softmax(-1)
        for i, entry in enumerate(entries):
            wanted = theirs[len(prompt) - 1 + i, text[i]].item()
            assert entry.values[0] == pytest.approx(wanted, abs=1e-4)
            assert entry.rank == 1


def test_chunks_prefix_hits_and_preemptions(checkpoint: Path, expected: list[list[int]]) -> None:
    """Preempted sequences find their own prefixes again, and go on behind them in chunks."""
    (architecture,) = json.loads((checkpoint / "config.json").read_text())["architectures"]
    ahead = ARCHITECTURES.index(architecture) % 3  # which cases are divided among architectures
    limits = {"num_gpu_blocks_override": 20, "max_num_seqs": 7, "max_num_batched_tokens": 7}
    texts, _, engine = generate(checkpoint, prompts(), steps_ahead=ahead, **limits)
    assert texts == expected
    assert engine.stats().prefix_hits > 0 and engine.stats().preemptions > 0


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("RwkvForCausalLM", {"vocab_size": 320, "hidden_size": 32}, "its layers keep a state of their own"),
        (
            "Zamba2ForCausalLM",
            {"time_step_limit": [0, {"__float__": "Infinity"}]},
            "keep a state of their own",
        ),
        ("Qwen3ForCausalLM", {"vocab_size": 320}, "the field 'hidden_size' .* is missing"),
    ],
)
def test_a_refusal_comes_before_fields_that_are_missing(
    tmp_path: Path, architecture: str, config: dict[str, object], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    with pytest.raises(ValueError, match=message):
        Engine.start(engine_config(tmp_path, load_format="dummy"), lambda _: None)
