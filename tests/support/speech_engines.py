"""An engine for transcriptions that says what a script tells it to."""

from collections.abc import AsyncGenerator, Callable, Sequence

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
