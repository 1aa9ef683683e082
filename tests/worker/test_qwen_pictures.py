"""Tiny Qwen-VL models answer as transformers does about pictures in any place, however steps are cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drawn_drafts import Draft, Writer, Written, hidden_of, none, partly_right
from opened import feature_of, open_runner
from pictured import Engine, Prompt, Prompts, assert_answers
from qwen_pictured import FIELDS, OUTPUT, Pictured
from ranks import Layout, Ranks, RanksOfTests
from sizes import worker_config

from models.config import read_config
from models.conversion.conversion_choice import Conversion
from models.towers.model import find_tower
from worker.features.media.media import Media
from worker.features.media.media_memory import row_bytes
from worker.protocol import Encode, NewSeq, Pooling, Sampling, SeqStep, StepInput
from worker.runner import Runner

SIZES = {"max_num_seqs": 6, "block_size": 4, "num_gpu_blocks_override": 256, "max_model_len": 96}
GREEDY = Sampling(max_tokens=OUTPUT, temperature=0, logprobs=0)


@pytest.fixture(scope="module", params=FIELDS)
def pictured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pictured:
    return Pictured.write(request.param, tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def runner(pictured: Pictured) -> Runner:
    return open_runner(pictured.folder, **SIZES, guesses=True)


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_answers_are_those_of_transformers(pictured: Pictured, runner: Runner, chunk: int) -> None:
    engine = Engine(runner.launch, runner.facts, pictured.prompts, chunk=chunk)
    assert_answers(engine.run(pictured.asked, OUTPUT), pictured.answers)


def test_rows_that_deeper_layers_add_count_among_the_bytes_that_are_kept(
    pictured: Pictured, runner: Runner
) -> None:
    media = feature_of(runner, Media)
    tower = find_tower(runner._model)  # pyright: ignore[reportPrivateUsage]
    assert tower is not None
    items = encoded(pictured.prompts, pictured.asked[-1])
    media.before(StepInput(1, [], [], fresh=True, encode=items))
    rows = media._steps._rows.values()  # pyright: ignore[reportPrivateUsage]
    each = row_bytes(tower, read_config(pictured.folder), torch.float32)
    assert sum(one.untyped_storage().nbytes() for one in rows) == each * sum(map(len, rows))


@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 2)], ids=str)
def test_ranks_answer_alike(pictured: Pictured, ranks: Ranks, layout: Layout) -> None:
    config = worker_config(folder=str(pictured.folder), model=read_config(pictured.folder), **SIZES)
    executor = RanksOfTests(ranks, layout, config)
    facts = executor.start()
    engine = Engine(executor.submit, facts, pictured.prompts, chunk=9)
    assert_answers(engine.run(pictured.asked, OUTPUT), pictured.answers)
    executor.stop()


def test_guesses_behind_pictures(pictured: Pictured, runner: Runner) -> None:
    """Each guess has its place on all axes."""

    def written(draft: Draft) -> list[Written]:
        with hidden_of(runner) as hidden:
            seqs = [Written(each.tokens, params, each.media) for each in pictured.asked]
            encode = [pictured.prompts.encode(number) for number in pictured.prompts.items]
            return Writer.of(runner).write(seqs, draft, hidden=hidden, encode=encode)

    params = Sampling(max_tokens=9, temperature=0, logprobs=1)
    truth = written(none)
    for plan in ([(9, [])], [(2, [7, 8]), (0, [5, 6])]):
        for one, other in zip(written(partly_right(truth, plan)), truth, strict=True):
            assert one.answer == other.answer


def encoded(prompts: Prompts, prompt: Prompt) -> list[Encode]:
    return [prompts.encode(number) for number in {place.number for place in prompt.media}]


def run(runner: Runner, new: NewSeq, row: SeqStep, **given: object) -> tuple[int, float]:
    output = runner.launch(StepInput(1, [new], [row], fresh=True, **given)).result()
    logprobs = output.logprobs[0]
    assert logprobs is not None
    return output.tokens[0], logprobs.values[0]


def test_a_known_prefix_may_end_inside_a_picture(pictured: Pictured, runner: Runner) -> None:
    prompt, right = pictured.asked[2], pictured.answers[2]
    length, known = len(prompt.tokens), 8
    assert known < prompt.media[0].length
    has_states = runner.facts.remembered_states is not None
    blocks = list(range(-(-length // 4)))
    first = SeqStep(0, 0, length, blocks, samples=True, kept=((known, 0),) if has_states else ())
    new = NewSeq(0, prompt.tokens, length, GREEDY, prompt.media)
    given = {"encode": encoded(pictured.prompts, prompt), "forget": []}
    assert run(runner, new, first, **given)[0] == right.tokens[0]
    blocks = [0, 1, *range(50, 50 + len(blocks) - 2)]
    source = 0 if has_states else -1
    second = SeqStep(1, known, length - known, blocks, samples=True, source=source)
    new = NewSeq(1, prompt.tokens, length, GREEDY, prompt.media)
    token, logprob = run(runner, new, second, **given)
    assert (token, logprob) == (right.tokens[0], pytest.approx(right.logprobs[0], abs=1e-4))


def test_after_a_preemption_generated_tokens_go_on_behind_the_picture(
    pictured: Pictured, runner: Runner
) -> None:
    prompt, right = pictured.asked[3], pictured.answers[3]
    tokens = prompt.tokens + right.tokens[:3]
    new = NewSeq(2, tokens, len(prompt.tokens), GREEDY, prompt.media)
    row = SeqStep(2, 0, len(tokens), list(range(-(-len(tokens) // 4))), samples=True, output_index=3)
    token, logprob = run(runner, new, row, encode=encoded(pictured.prompts, prompt))
    assert (token, logprob) == (right.tokens[3], pytest.approx(right.logprobs[3], abs=1e-4))


@pytest.mark.parametrize("chunk", [7, 512])
def test_hidden_states_are_embedded(pictured: Pictured, chunk: int) -> None:
    architecture = read_config(pictured.folder).architecture
    served_as = Conversion(runner="pooling", convert="embed", architecture=architecture)
    runner = open_runner(pictured.folder, conversion=served_as, **SIZES)
    prompt = pictured.asked[4]
    length = len(prompt.tokens)
    new = NewSeq(0, prompt.tokens, length, Pooling("token_embed", use_activation=False), prompt.media)
    encode = encoded(pictured.prompts, prompt)
    free = list(range(-(-length // 4)))
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        blocks, free = free[: -(-end // 4) - -(-start // 4)], free[-(-end // 4) - -(-start // 4) :]
        row = SeqStep(0, start, end - start, blocks, samples=False, pools=end == length)
        step = StepInput(1, [] if start else [new], [row], encode=[] if start else encode)
        output = runner.launch(step).result()
    found = output.pooled[0]
    vectors = torch.frombuffer(bytearray(found.data), dtype=torch.float32).view(found.shape)
    torch.testing.assert_close(vectors, pictured.hidden(prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "architecture", ["Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"]
)
def test_files_as_they_were_published(architecture: str, tmp_path: Path) -> None:
    pictured = Pictured.write(architecture, tmp_path)
    pictured.publish()
    runner = open_runner(tmp_path, **SIZES)
    engine = Engine(runner.launch, runner.facts, pictured.prompts)
    assert_answers(engine.run(pictured.asked, OUTPUT), pictured.answers)
