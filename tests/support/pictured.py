"""Tiny checkpoints of models that see pictures, prompts with pictures in them, and an engine that runs them.

To prove a family: `write_pictured` saves a random model of transformers with the settings of its pictures;
`Prompts` makes prompts of token ids and Pillow pictures with the family's own processor; `expected` gives
what transformers generates, and `Engine.run` what ours does, in steps of any size. tests/worker/test_media.py
shows all of it with LLaVA.
"""

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import pytest
import torch
import transformers
from PIL.Image import Image
from shape_files import read_shapes
from tiny import randomise
from torch import nn

from models.media.item import AudioProcessor, Prepared, Processor
from models.media.registry import find_media, make_processor
from models.towers.tower import Tower, TowerInput, advance, count_layers
from worker.buffers import Buffer
from worker.protocol import Encode, MediaPlace, NewSeq, Sampling, SeqStep, StepInput, StepOutput
from worker.worker_facts import WorkerFacts

_SHAPES = read_shapes("pictured")
TEXT: dict[str, object] = _SHAPES["text"]
"""The fields of a tiny text. Ids above 300 are free for the tokens that stand for pictures."""
VISION: dict[str, object] = _SHAPES["vision"]
"""The fields of a tiny tower."""


def write_pictured(
    architecture: str, folder: Path, fields: dict[str, Any], settings: dict[str, Any], scale: float = 0.3
) -> nn.Module:
    """Save a random model of this class, and return it. `settings`: its preprocessor_config.json."""
    made: Any = getattr(transformers, architecture)
    config = made.config_class(**{"dtype": "float32", "architectures": [architecture], **fields})
    model = made._from_config(config, attn_implementation="eager").eval()
    randomise(model, seed=0, scale=scale)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


@dataclass
class Prompt:
    """A prompt with pictures, in the place of whose tokens any would do."""

    tokens: list[int]
    pictures: list[Any]
    media: tuple[MediaPlace, ...]


class Prompts:
    """Makes prompts for the checkpoint in a folder, and keeps the items that they name."""

    def __init__(self, folder: Path) -> None:
        files = find_media(folder)
        assert files is not None, "the architecture has no processor of media"
        self.processor: Processor = make_processor(files)
        self.items: dict[int, Prepared] = {}
        self._numbers: dict[int, int] = {}

    def make(self, *pieces: Sequence[int] | Image | np.ndarray) -> Prompt:
        """Put pieces one behind the other. The same picture object again has the same number, and so have the
        same samples of a sound."""
        prompt = Prompt([], [], ())
        for piece in pieces:
            if not isinstance(piece, Image | np.ndarray):
                prompt.tokens += piece
                continue
            number = self._numbers.setdefault(id(piece), len(self._numbers))
            item = self.items.setdefault(number, self._prepare(piece))
            layout = self.processor.layout(item).spelled(lambda text: [6 + len(text) % 7])
            place = MediaPlace(
                number=number,
                kind=item.kind,
                at=len(prompt.tokens),
                length=len(layout.tokens),
                runs=tuple(layout.embeddings),
                grid=item.grid,
            )
            prompt.tokens += layout.tokens
            prompt.pictures.append(piece)
            prompt.media += (place,)
        return prompt

    def _prepare(self, piece: Image | np.ndarray) -> Prepared:
        if isinstance(piece, np.ndarray):
            return cast("AudioProcessor", self.processor).prepare_audio([piece])
        return self.processor.prepare(piece)

    def encode(self, number: int) -> Encode:
        item = self.items[number]
        pixels = Buffer(item.pixels)
        return Encode(number, item.kind, item.shape, item.grid, item.embeddings, pixels)


def tower_input(item: Prepared) -> TowerInput:
    """A prepared item as a tower takes it."""
    if item.kind == "audio":
        features = torch.from_numpy(np.array(item.pixels)).view(torch.float32).view(item.shape[:2])
        return TowerInput(item.kind, features, item.grid, item.embeddings)
    pixels = torch.from_numpy(np.array(item.pixels)).view(item.shape)
    return TowerInput(item.kind, pixels, item.grid, item.embeddings)


def encoded_by_layers(tower: Tower, items: Sequence[TowerInput]) -> list[torch.Tensor]:
    """What a tower makes, computed layer by layer, in as many parts as it says that it has layers."""
    computation = tower.encode(items)
    for _ in range(count_layers(tower)):
        assert advance(computation, 1) is None
    made = advance(computation, 1)
    assert made is not None
    return made


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])


@torch.inference_mode()
def expected(
    model: nn.Module, prompt: Prompt, count: int, inputs: Callable[[list[Any], list[int]], dict[str, Any]]
) -> Answer:
    """The likeliest tokens by transformers. `inputs`: what its model takes beside ids, of both."""
    answer = Answer()
    for _ in range(count):
        ids = prompt.tokens + answer.tokens
        beside = inputs(prompt.pictures, ids) if prompt.pictures else {}
        logits = model(input_ids=torch.tensor([ids]), use_cache=False, **beside).logits[0, -1].float()
        answer.tokens.append(int(logits.argmax()))
        answer.logprobs.append(float(logits.log_softmax(-1).max()))
    return answer


class Handle(Protocol):
    def result(self) -> StepOutput: ...


@dataclass
class _Live:
    prompt: Prompt
    slot: int
    answer: Answer
    count: int
    computed: int = 0
    planned: int = 0
    blocks: int = 0
    entered: bool = False

    @property
    def known(self) -> int:
        return len(self.prompt.tokens) + self.planned

    @property
    def done(self) -> bool:
        return self.planned >= self.count and self.computed >= self.known - 1


class Engine:
    """A minimal engine: up to `chunk` tokens of each live sequence in a step, unless prompts are computed
    whole; blocks are never freed.

    Items are encoded in the first step that needs them, and forgotten when no sequence does any more.
    """

    def __init__(
        self, launch: Callable[[StepInput], Handle], facts: WorkerFacts, prompts: Prompts, *, chunk: int = 512
    ) -> None:
        self._launch, self._facts, self._prompts, self._chunk = launch, facts, prompts, chunk
        self._free = list(range(facts.num_blocks))
        self._held: set[int] = set()
        self._flying: deque[tuple[list[tuple[_Live, bool]], Handle]] = deque()
        self.encoded = 0
        """How many items have been encoded."""

    def run(self, prompts: Sequence[Prompt], count: int, *, ahead: int = 1) -> list[Answer]:
        """Run these prompts together, each in the slot of its number, to `count` tokens each."""
        live = [_Live(prompt, slot, Answer(), count) for slot, prompt in enumerate(prompts)]
        while self._flying or not all(each.done for each in live):
            if not all(each.done for each in live):
                self._plan(live)
            if len(self._flying) > ahead or all(each.done for each in live):
                self._land()
        return [each.answer for each in live]

    def _plan(self, live: list[_Live]) -> None:
        new: list[NewSeq] = []
        seqs: list[SeqStep] = []
        rows: list[tuple[_Live, bool]] = []
        needed = {number for each in live for number in _needed(each)}
        forget = [number for number in self._held if number not in needed]
        self._held -= set(forget)
        encode: list[Encode] = []
        for each in live:
            if each.done:
                continue
            if not each.entered:
                tokens, params = (
                    each.prompt.tokens,
                    Sampling(max_tokens=each.count, temperature=0, logprobs=0),
                )
                new.append(NewSeq(each.slot, tokens, len(tokens), params, each.prompt.media))
                each.entered = True
            end = self._end(each)
            for place in each.prompt.media:
                if (
                    place.at < end
                    and place.at + place.length > each.computed
                    and place.number not in self._held
                ):
                    self._held.add(place.number)
                    encode.append(self._prompts.encode(place.number))
            samples = end == each.known
            gained = -(-end // self._facts.block_size) - each.blocks
            blocks = [self._free.pop() for _ in range(gained * len(self._facts.windows))]
            seqs.append(SeqStep(each.slot, each.computed, end - each.computed, blocks, samples, each.planned))
            each.blocks += gained
            each.computed = end
            each.planned += samples
            rows.append((each, samples))
        self.encoded += len(encode)
        step = StepInput(number=1, new=new, seqs=seqs, encode=encode, forget=forget)
        self._flying.append((rows, self._launch(step)))

    def _end(self, each: _Live) -> int:
        if self._facts.whole_prompts:
            return each.known
        end = min(each.computed + self._chunk, each.known)
        if self._facts.whole_media:
            for place in each.prompt.media:
                if place.at < end < place.at + place.length:
                    end = place.at if place.at > each.computed else place.at + place.length
        return end

    def _land(self) -> None:
        rows, handle = self._flying.popleft()
        output = handle.result()
        for index, (each, samples) in enumerate(rows):
            if samples:
                each.answer.tokens.append(output.tokens[index])
                logprobs = output.logprobs[index]
                assert logprobs is not None
                each.answer.logprobs.append(logprobs.values[0])


def _needed(each: _Live) -> set[int]:
    return {place.number for place in each.prompt.media if place.at + place.length > each.computed}


def assert_answers(answers: list[Answer], right: list[Answer]) -> None:
    """Tokens are equal, and their logprobs within 1e-4."""
    for answer, other in zip(answers, right, strict=True):
        assert answer.tokens == other.tokens
        assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4)
