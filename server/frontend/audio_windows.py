"""Pieces of a recording as engines take them, and what engines answer of them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from engine_core.protocol import Source
from server.media.audio.recordings import Recording
from server.model_facts import Facts
from server.speech.speech_model import Draw, Drawn, Piece, SpeechText
from server.speech.transcribe import MOST_AT_ONCE
from server.speech.vocabulary import SpeechTokens
from server.text.tokenizer import Tokenizer
from worker.buffers import Buffer
from worker.protocol import Sampling, Timestamps, TokenLogprobs, Vectors


class RecordedPieces:
    """The windows of one recording, as sources for engines and with what engines answer of them."""

    def __init__(self, known: SpeechTokens, recording: Recording, facts: Facts, tokenizer: Tokenizer) -> None:
        self.known = known
        self._recording, self._tokenizer = recording, tokenizer
        self._length = facts.ready.worker.source_len
        self._sources: OrderedDict[Piece, Source] = OrderedDict()
        """The pieces used last, whose features need not be read again."""

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), True)

    def text(self) -> SpeechText:
        return self._tokenizer.text_state([], True, None)

    async def source(self, piece: Piece) -> Source:
        if (found := self._sources.get(piece)) is None:
            features = await asyncio.to_thread(self._recording.piece, piece.first, piece.frames)
            hash = self._recording.hash_of(piece.first, piece.frames).hex()
            found = Source(hash=hash, length=self._length, features=Buffer(features))
        self._sources[piece] = found
        self._sources.move_to_end(piece)
        while len(self._sources) > MOST_AT_ONCE:
            self._sources.popitem(last=False)
        return found


def sampling_of(how: Draw, known: SpeechTokens) -> Sampling:
    """What the engine is told of how tokens are drawn."""
    if how.told:
        return Sampling(
            max_tokens=how.max_tokens,
            temperature=0.0,
            allowed_token_ids=how.only,
            told=how.told,
            stop_token_ids=(known.end,),
            logprobs=0,
        )
    greedy = how.temperature == 0
    return Sampling(
        max_tokens=how.max_tokens,
        temperature=how.temperature,
        top_p=1.0 if greedy else how.top_p,
        top_k=0 if greedy else how.top_k,
        min_p=0.0 if greedy else how.min_p,
        seed=how.seed,
        presence_penalty=how.presence_penalty,
        frequency_penalty=how.frequency_penalty,
        repetition_penalty=how.repetition_penalty,
        stop_token_ids=(known.end,),
        logprobs=0,
        masked_logprobs=True,
        suppressed=known.suppressed,
        suppressed_first=known.suppressed_first,
        timestamps=Timestamps(known.first_timestamp, known.end, known.no_timestamps, known.most_first),
    )


def drawn(tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Drawn]:
    return [
        Drawn(token, each.values[0], tuple(each.told)) for token, each in zip(tokens, logprobs, strict=True)
    ]


def matrix_of(vectors: Vectors) -> np.ndarray:
    """A matrix of an engine, row by row."""
    return np.frombuffer(vectors.data, np.float32).reshape(vectors.shape)
