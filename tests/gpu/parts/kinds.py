"""Drafters, models that read recordings, and models that see pictures, tiny ones: the card's greedy tokens in
float32 beside the CPU's.
"""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from beside_cpu import answers, compare_all, compared, opened
from results import Result
from workbench import Part, Workbench

from engine_core.features.speculation.model_speculator import ModelSpeculator
from engine_core.protocol import AddRequest, Source
from models.config import read_config
from models.conversion.conversion_choice import Conversion
from worker.buffers import Buffer
from worker.config import DrafterConfig
from worker.protocol import Sampling, Timestamps

_MOST = 3
_SHOWN = (
    "LlavaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
)


def compare_kinds(bench: Workbench) -> Iterator[Result]:
    """All kinds at once, in a process each."""
    yield from compare_all(bench, "kinds", [[kind] for kind in bench.some(tuple(KINDS))])


def compare(kind: str, folder: Path, device: str) -> Result:
    return KINDS[kind](kind, folder, device)


def _compare_drafter(kind: str, folder: Path, device: str) -> Result:
    """Answers are those without guesses, and guesses are the CPU's."""
    import draft_heads
    from tiny import tiny_checkpoint

    target, head = folder / "target", folder / "head"
    if kind == "mtp":
        target, _ = draft_heads.write_next_token("DeepseekV3ForCausalLM", folder)
        head = target
    else:
        tiny_checkpoint("LlamaForCausalLM", target, num_hidden_layers=7)
        if kind == "draft_model":
            head = target  # all of its guesses hold
        else:
            getattr(draft_heads, f"write_{kind}")(head)
    config = read_config(head)
    whole = Conversion(runner="generate", convert="none", architecture=config.architecture)
    conversion = whole if kind == "draft_model" else None
    drafter = DrafterConfig(folder=str(head), model=config, conversion=conversion, method=kind, most=_MOST)
    prompts = [[(11 * at + 7 * number) % 290 + 10 for at in range(5 + 9 * number)] for number in range(4)]
    greedy = Sampling(max_tokens=16, temperature=0)
    requests = [AddRequest(id=at, tokens=prompt, params=greedy) for at, prompt in enumerate(prompts)]
    found: list[list[list[int]]] = []
    drafts: list[list[list[int]]] = []
    totals: list[tuple[int, int]] = []
    ModelSpeculator.lengths = _always  # whatever pays
    offer = ModelSpeculator.offer

    def noted(self: ModelSpeculator, seq: Any, guesses: list[int]) -> None:
        drafts[-1].append([*seq.tokens, *guesses])
        offer(self, seq, guesses)

    ModelSpeculator.offer = noted
    for where, given in (("cpu", None), ("cpu", drafter), (device, drafter)):
        asked = {} if given is None else {"method": kind, "model": str(head)}
        drafts.append([])
        with opened(target, where, dtype="float32", drafter=given) as runner:
            tokens, counted = answers(target, runner, requests, speculative_config=asked or None)
        found.append(tokens)
        if given is not None:
            totals.append((counted.totals.guessed, sum(counted.totals.held)))
    differ = sum(one != other for one, other in zip(drafts[2], drafts[1], strict=False))
    more = f"; {differ} of {len(drafts[1])} drafts differ, {totals[1][1]} of {totals[1][0]} guesses held"
    return compared(kind, [found[2], drafts[2]], [found[0], drafts[1]], more)


def _always(self: ModelSpeculator, seqs: Collection[Any]) -> dict[Any, int]:
    return {seq: _MOST for seq in seqs if seq in self._drafted}  # pyright: ignore[reportPrivateUsage]


def _compare_speech(kind: str, folder: Path, device: str) -> Result:
    """Noise is read, with timestamps and without."""
    from tiny_whisper import END, FIRST_STAMP, IDS, make

    make(folder)
    numbers = np.random.default_rng(3)
    prompt = [IDS["<|startoftranscript|>"], IDS["<|en|>"], IDS["<|transcribe|>"]]
    stamps = Timestamps(FIRST_STAMP, END, IDS["<|notimestamps|>"], 50)
    requests: list[AddRequest] = []
    for number in range(3):
        features = numbers.standard_normal((80, 3000)).astype(np.float32)
        source = Source(str(number), 1500, features=Buffer(features.tobytes()))
        for at, rules in enumerate((None, stamps)):
            params = Sampling(max_tokens=12, temperature=0, timestamps=rules)
            requests.append(AddRequest(id=2 * number + at, tokens=prompt, params=params, source=source))
    found: list[list[list[int]]] = []
    for where in ("cpu", device):
        with opened(folder, where, dtype="float32") as runner:
            found.append(answers(folder, runner, requests)[0])
    return compared(kind, found[1], found[0])


def _compare_pictures(kind: str, folder: Path, device: str) -> Result:
    """Prompts with pictures in several places."""
    from media_files import noise
    from pictured import Engine, Prompts

    _write_pictured(kind, folder)
    prompts = Prompts(folder)
    one, two = noise(40, 28), noise(31, 90)
    asked = [
        prompts.make([5, 9, 17], one, [44, 200, 7]),
        prompts.make([5, 6], two, [80, 81, 82], one, [3, 9]),
    ]
    found: list[list[list[int]]] = []
    for where in ("cpu", device):
        with opened(folder, where, dtype="float32", max_model_len=512, max_num_batched_tokens=512) as runner:
            engine = Engine(runner.launch, runner.facts, prompts)
            found.append([answer.tokens for answer in engine.run(asked, 10)])
    return compared(kind, found[1], found[0])


def _write_pictured(kind: str, folder: Path) -> None:
    import gemma_pictured
    import pictured
    import qwen_pictured

    if kind.startswith("Qwen2"):
        qwen_pictured.Pictured.write(kind, folder)
        return
    fields, settings = gemma_pictured.FIELDS, gemma_pictured.SETTINGS
    if kind.startswith("Llava"):
        settings = {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
        }
        fields = {
            "text_config": {**pictured.TEXT, "model_type": "llama"},
            "vision_config": {**pictured.VISION, "model_type": "clip_vision_model"},
            "image_token_index": 310,
        }
    pictured.write_pictured(kind, folder, fields, settings)


Compare = Callable[[str, Path, str], Result]
KINDS: dict[str, Compare] = {
    **dict.fromkeys(("draft_model", "eagle3", "eagle", "mtp"), _compare_drafter),
    "WhisperForConditionalGeneration": _compare_speech,
    **dict.fromkeys(_SHOWN, _compare_pictures),
}


PARTS = (Part("kinds", compare_kinds, 200),)
