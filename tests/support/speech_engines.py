"""Engines for transcriptions: one that says what a script tells it to, and transformers' own model."""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np

from server.speech.speech_model import Draw, Drawn, Piece, SpeechText
from server.speech.vocabulary import SpeechTokens

KNOWN = SpeechTokens(
    start=101,
    end=100,
    previous=103,
    no_speech=104,
    no_timestamps=120,
    languages={"en": 110, "de": 111},
    tasks={"transcribe": 112, "translate": 113},
)
STAMP = KNOWN.first_timestamp


class Words:
    """Shows each token of text as a letter behind a space."""

    def push(self, tokens: Sequence[int]) -> str:
        return "".join(f" {chr(97 + token % 26)}{token}" for token in tokens)

    def flush(self) -> str:
        return ""


Script = Callable[[list[int], Draw, Piece], Sequence[int | Drawn]]


class ScriptedEngine:
    """Says of each piece what the script says, and no speech with a given probability."""

    def __init__(self, script: Script, no_speech: float = 0.1, language: int = 110) -> None:
        self.script, self.language, self.end = script, language, KNOWN.end
        self.told = float(np.log(no_speech))
        self.prompts: list[list[int]] = []
        self.draws: list[Draw] = []
        self.pieces: list[Piece] = []
        self.probes = 0

    async def draw(self, prompt: list[int], how: Draw, piece: Piece) -> AsyncGenerator[list[Drawn], None]:
        if how.told:
            self.probes += 1
            yield [Drawn(self.language, 0.0, (self.told,))]
            return
        self.prompts.append(prompt)
        self.draws.append(how)
        self.pieces.append(piece)
        for token in self.script(prompt, how, piece):
            yield [token if isinstance(token, Drawn) else Drawn(token, -0.1)]
        yield [Drawn(self.end, -0.1)]

    async def align(self, tokens: list[int], skip: int, piece: Piece, columns: int) -> np.ndarray:
        """Each token is said for 0.1 s, one after the other."""
        rows = len(tokens) - skip
        matrix = np.full((rows, columns), -0.1, np.float32)
        for row in range(rows):
            matrix[row, row * 5 : (row + 1) * 5] = 1.0
        return matrix

    def decode(self, tokens: Sequence[int]) -> str:
        return self.text().push(tokens)

    def text(self) -> SpeechText:
        return Words()


class TransformersEngine:
    """Draws greedily with transformers' model, bound by its own rules of timestamps."""

    def __init__(self, model: Any, features: np.ndarray, rules: Callable[[int], Sequence[Any]]) -> None:
        self._model, self._features, self._rules = model, features, rules

    async def draw(self, prompt: list[int], how: Draw, piece: Piece) -> AsyncGenerator[list[Drawn], None]:
        import torch

        padded = np.zeros((len(self._features), 3000), np.float32)
        rows = self._features[:, piece.first : piece.first + 3000]
        padded[:, : rows.shape[1]] = rows
        encoded = self._model.model.encoder(torch.from_numpy(padded)[None]).last_hidden_state
        ids, rules = list(prompt), self._rules(len(prompt))
        for _ in range(how.max_tokens):
            known = torch.tensor([ids])
            with torch.no_grad():
                scores = self._model(encoder_outputs=(encoded,), decoder_input_ids=known).logits[:, -1]
            told = tuple(float(torch.log_softmax(scores, -1)[0, id]) for id in how.told)
            if how.only:
                mask = torch.full_like(scores, -torch.inf)
                mask[:, list(how.only)] = 0
                scores = scores + mask
            else:
                for rule in rules:
                    scores = rule(known, scores)
            token = int(scores.argmax())
            yield [Drawn(token, float(torch.log_softmax(scores, -1)[0, token]), told)]
            ids.append(token)
            if token == self._model.generation_config.eos_token_id:
                return

    async def align(self, tokens: list[int], skip: int, piece: Piece, columns: int) -> np.ndarray:
        raise AssertionError("no test here asks this engine for times of words")

    def decode(self, tokens: Sequence[int]) -> str:
        return Words().push(tokens)

    def text(self) -> SpeechText:
        return Words()
