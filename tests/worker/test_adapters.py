"""A worker computes sequences with and without adapters in the same steps, which are replayed."""

from pathlib import Path

import pytest
from adapted_runner import OUTPUTS, PROMPTS, call, generate, load
from opened import open_runner
from peft_adapters import Made, make_adapter
from tiny import tiny_checkpoint

from worker.calls.messages import DROP_ADAPTER, ENTER_ADAPTER, READ_ADAPTER
from worker.options import LoraOptions
from worker.runner import Runner


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def made(base: Path) -> list[Made]:
    return [
        make_adapter(base, base.parent / f"adapter-{seed}", seed, target_modules=modules, r=4 * seed)
        for seed, modules in ((1, "all-linear"), (2, ["q_proj", "up_proj", "embed_tokens", "lm_head"]))
    ]


@pytest.fixture(scope="module")
def runner(base: Path) -> Runner:
    return open_runner(base, lora=LoraOptions(enable_lora=True, max_cpu_loras=4), dtype="float32")


def greedy(model: Made, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(OUTPUTS):
        tokens.append(int(model.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_rows_have_their_own_adapters_and_the_bits_that_they_have_alone(
    runner: Runner, base: Path, made: list[Made]
) -> None:
    facts = [load(runner, number, each.folder) for number, each in enumerate(made, 1)]
    assert all(each.bytes > 0 for each in facts)
    together = generate(runner, {0: (0, 0), 1: (1, 0), 2: (2, 0), 3: (1, 4)})
    for slot, chosen in ((0, (0, 0)), (1, (1, 0)), (2, (2, 0)), (3, (1, 4))):
        assert generate(runner, {slot: chosen})[slot] == together[slot]
    assert generate(open_runner(base, dtype="float32"), {0: (0, 0)})[0] == together[0]
    for slot, model in ((1, made[0]), (2, made[1])):
        assert [token for token, _ in together[slot]] == greedy(model, PROMPTS[slot])
    tokens = [[token for token, _ in each] for each in together.values()]
    assert tokens[1] != tokens[2]


def test_what_a_number_meant_before_is_gone(runner: Runner, made: list[Made]) -> None:
    load(runner, 3, made[0].folder)
    first = generate(runner, {1: (3, 0)})
    call(runner, READ_ADAPTER, 3, str(made[1].folder))
    assert generate(runner, {1: (3, 0)}) == first
    call(runner, ENTER_ADAPTER, 3)
    assert generate(runner, {1: (3, 0)}) == generate(runner, {1: (2, 0)}) != first
    call(runner, DROP_ADAPTER, 3)
    assert generate(runner, {1: (3, 0)}) == generate(runner, {1: (0, 0)})


def test_a_refused_adapter_is_an_answer(runner: Runner, base: Path, made: list[Made]) -> None:
    for number, folder, said in (
        (1, base, "has no adapter_config.json"),
        (5, made[0].folder, "there is room for 4"),
    ):
        with pytest.raises(ValueError, match=said):
            call(runner, READ_ADAPTER, number, str(folder))
    narrow = open_runner(base, lora=LoraOptions(enable_lora=True, max_lora_rank=2))
    with pytest.raises(ValueError, match="LoRA rank 4 is greater than max_lora_rank 2"):
        call(narrow, READ_ADAPTER, 1, str(made[0].folder))
    only = open_runner(base, lora=LoraOptions(enable_lora=True, lora_target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="and --lora-target-modules allows q_proj only"):
        call(only, READ_ADAPTER, 1, str(made[0].folder))
    with pytest.raises(ValueError, match="--lora-dtype bfloat16: adapters are held in the model's type"):
        open_runner(base, lora=LoraOptions(enable_lora=True, lora_dtype="bfloat16"), dtype="float32")
    with pytest.raises(ValueError, match="workers have no method read_adapter"):
        call(open_runner(base), READ_ADAPTER, 1, str(made[0].folder))
