"""Tiny checkpoints of models that see pictures, prompts with pictures in them, and an engine that runs them.

To prove a family: `write_pictured` saves a random model of transformers with the settings of its pictures;
`Prompts` makes prompts of token ids and Pillow pictures with the family's own processor; `expected` gives
what transformers generates, and `Engine.run` what ours does, in steps of any size. tests/worker/test_media.py
shows all of it with LLaVA.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from PIL.Image import Image
from scheduled import Answer, Handle, Loop
from shape_files import read_shapes
from tiny import VOCAB_SIZE, randomise
from torch import nn

from engine_core.features.media.media_items import MediaItems
from engine_core.prompt_media import Media
from engine_core.protocol import AddRequest
from models.media.item import AudioProcessor, Prepared, Processor
from models.media.registry import find_media, make_processor
from models.towers.tower import Tower, TowerInput, advance, count_layers
from worker.buffers import Buffer
from worker.protocol import Encode, MediaPlace, Sampling, StepInput
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

    def media_of(self, prompt: Prompt) -> tuple[Media, ...]:
        """The items of a prompt, as a request brings them."""
        return tuple(
            Media(
                hash=b"%d" % place.number,
                kind=place.kind,
                at=place.at,
                length=place.length,
                runs=place.runs,
                shape=self.items[place.number].shape,
                grid=place.grid,
                pixels=Buffer(self.items[place.number].pixels),
            )
            for place in prompt.media
        )

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


class Engine:
    """The scheduler over a worker: a step has up to `chunk` tokens of each prompt that may be cut."""

    def __init__(
        self, launch: Callable[[StepInput], Handle], facts: WorkerFacts, prompts: Prompts, *, chunk: int = 512
    ) -> None:
        self._launch, self._facts, self._prompts, self._chunk = launch, facts, prompts, chunk
        self._holds = True
        """Whether the worker may hold items that another engine has numbered."""
        self.encoded = 0
        """How many items the last run has encoded."""

    def run(self, prompts: Sequence[Prompt], count: int, *, ahead: int = 1) -> list[Answer]:
        """Run these prompts together, to `count` tokens each."""
        options = {"long_prefill_token_threshold": self._chunk, "speculative_config": None}
        loop = Loop(self._begin_anew, self._facts, VOCAB_SIZE, ahead, max_token_gap_ms=0, **options)
        params = Sampling(max_tokens=count, temperature=0, logprobs=0)
        requests = [
            AddRequest(id, prompt.tokens, params, media=self._prompts.media_of(prompt))
            for id, prompt in enumerate(prompts)
        ]
        self._holds = True
        loop.run(requests)
        media = loop.scheduler.hooks.find(MediaItems)
        self.encoded = media.encoded if media else 0
        return [loop.answers[request.id] for request in requests]

    def _begin_anew(self, step: StepInput) -> Handle:
        """Launch a step; the first one of a run has the worker forget the items of other runs."""
        fresh, self._holds = self._holds, False
        return self._launch(replace(step, fresh=fresh))


def assert_answers(answers: list[Answer], right: list[Answer]) -> None:
    """Tokens are equal, and their logprobs within 1e-4."""
    for answer, other in zip(answers, right, strict=True):
        assert answer.tokens == other.tokens
        assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4)
