"""Drafters, models that read recordings, and models that see pictures, tiny ones: the card's greedy tokens in
float32 beside the CPU's.

    python tests/gpu/parts/kinds.py KIND DEVICE

prints a result in JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
FOLDERS = (HERE.parents[2], HERE.parent, HERE.parents[1] / "support", HERE.parents[1] / "bench")
sys.path[:0] = [str(folder) for folder in FOLDERS]

import numpy as np  # noqa: E402
from results import Result  # noqa: E402
from scheduled import Loop  # noqa: E402
from sizes import worker_config  # noqa: E402
from workbench import Part, Workbench  # noqa: E402

from engine_core.protocol import Add, Source  # noqa: E402
from engine_core.scheduling.guesses.model_guesser import ModelGuesser  # noqa: E402
from models.config import read_config  # noqa: E402
from models.conversion.conversion_choice import Conversion  # noqa: E402
from models.medusa_config import read_medusa  # noqa: E402
from worker.buffers import Buffer  # noqa: E402
from worker.config import DrafterConfig  # noqa: E402
from worker.protocol import Sampling, Timestamps  # noqa: E402
from worker.runner import Runner  # noqa: E402

_SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 6,
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 64,
    "gpu_memory_utilization": 0.06,
}
_MOST = 3
_SHOWN = (
    "LlavaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
)


def compare_kinds(bench: Workbench) -> Iterator[Result]:
    """All kinds at once, in a process each: most of the time goes into compiling."""
    commands = [[sys.executable, __file__, kind, bench.target.type] for kind in bench.some(tuple(KINDS))]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    for process in running:
        printed, _ = process.communicate()
        yield from (Result(**json.loads(line)) for line in printed.splitlines() if line.startswith("{"))
        if code := process.returncode:
            yield Result(str(process.args), f"its process ended with {code}", wrong=1)


def _open(folder: Path, device: str, **given: Any) -> Runner:
    sizes = {**_SIZES, "gpu_memory_utilization": 0.06 if device == "cuda" else None, **given}
    config = worker_config(folder=str(folder), model=read_config(folder), device=device, **sizes)
    runner = Runner(config, lambda phase, part: None)
    while runner.prepare():
        pass
    return runner


def _answers(folder: Path, runner: Runner, requests: list[Add], **asked: Any) -> tuple[list[list[int]], Any]:
    dummy: Any = SimpleNamespace(
        runner=runner, facts=runner.facts, shape=SimpleNamespace(vocabulary=read_config(folder).vocab_size)
    )
    loop = Loop(dummy, 1, **asked)
    return loop.run(requests), loop.scheduler.drafts


def _told(kind: str, found: object, expected: object, more: str = "") -> Result:
    text = "as on the CPU" if found == expected else "not as on the CPU"
    return Result(kind, f"{text}{more}", wrong=int(found != expected))


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
    config = read_medusa(head, read_config(target)) or read_config(head)
    whole = Conversion(runner="generate", convert="none", architecture=config.architecture)
    drafter = DrafterConfig(
        folder=str(head),
        model=config,
        conversion=whole if kind == "draft_model" else None,
        method=kind,
        most=_MOST,
    )
    prompts = [[(11 * at + 7 * number) % 290 + 10 for at in range(5 + 9 * number)] for number in range(4)]
    greedy = Sampling(max_tokens=16, temperature=0)
    requests = [Add(id=at, tokens=prompt, params=greedy) for at, prompt in enumerate(prompts)]
    found: list[list[list[int]]] = []
    drafts: list[list[list[int]]] = []
    totals: list[tuple[int, int]] = []
    ModelGuesser.lengths = _always  # whatever pays
    offer = ModelGuesser.offer

    def noted(self: ModelGuesser, seq: Any, guesses: list[int]) -> None:
        drafts[-1].append([*seq.tokens, *guesses])
        offer(self, seq, guesses)

    ModelGuesser.offer = noted
    for where, given in (("cpu", None), ("cpu", drafter), (device, drafter)):
        asked = {} if given is None else {"method": kind, "model": str(head)}
        runner = _open(target, where, drafter=given)
        drafts.append([])
        tokens, counted = _answers(target, runner, requests, speculative_config=asked or None)
        found.append(tokens)
        if given is not None:
            totals.append((counted.totals.guessed, sum(counted.totals.held)))
        runner.close()
    differ = sum(one != other for one, other in zip(drafts[2], drafts[1], strict=False))
    more = f"; {differ} of {len(drafts[1])} drafts differ, {totals[1][1]} of {totals[1][0]} guesses held"
    return _told(kind, [found[2], drafts[2]], [found[0], drafts[1]], more)


def _always(self: ModelGuesser, seqs: Collection[Any]) -> dict[Any, int]:
    return {seq: _MOST for seq in seqs if seq in self._drafted}  # pyright: ignore[reportPrivateUsage]


def _compare_speech(kind: str, folder: Path, device: str) -> Result:
    """Noise is read, with timestamps and without."""
    from tiny_whisper import END, FIRST_STAMP, IDS, make

    make(folder)
    numbers = np.random.default_rng(3)
    prompt = [IDS["<|startoftranscript|>"], IDS["<|en|>"], IDS["<|transcribe|>"]]
    stamps = Timestamps(FIRST_STAMP, END, IDS["<|notimestamps|>"], 50)
    requests: list[Add] = []
    for number in range(3):
        features = numbers.standard_normal((80, 3000)).astype(np.float32)
        source = Source(str(number), 1500, features=Buffer(features.tobytes()))
        for at, rules in enumerate((None, stamps)):
            params = Sampling(max_tokens=12, temperature=0, timestamps=rules)
            requests.append(Add(id=2 * number + at, tokens=prompt, params=params, source=source))
    found: list[list[list[int]]] = []
    for where in ("cpu", device):
        runner = _open(folder, where)
        found.append(_answers(folder, runner, requests)[0])
        runner.close()
    return _told(kind, found[1], found[0])


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
        runner = _open(folder, where, max_model_len=512, max_num_batched_tokens=512)
        engine = Engine(runner.launch, runner.facts, prompts)
        found.append([answer.tokens for answer in engine.run(asked, 10)])
        runner.close()
    return _told(kind, found[1], found[0])


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
    **dict.fromkeys(("draft_model", "eagle3", "eagle", "medusa", "mtp"), _compare_drafter),
    "WhisperForConditionalGeneration": _compare_speech,
    **dict.fromkeys(_SHOWN, _compare_pictures),
}


def main(kind: str, device: str) -> None:
    with TemporaryDirectory() as place:
        try:
            result = KINDS[kind](kind, Path(place), device)
        except Exception as error:
            result = Result(kind, f"{type(error).__name__}: {error}"[:300], wrong=1)
    print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

PARTS = (Part("kinds", compare_kinds, 200),)
