"""A scripted frontend whose model transcribes: recordings are decoded, and a script says their text."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

from fake_frontend import EOS, FakeFrontend
from speech_engines import Script, ScriptedEngine

from engine_core.client.in_flight import AddOptions
from server.access.admission import Admission
from server.frontend.transcriber import Transcriber
from server.media.audio.audio_decoding import decode_audio
from server.media.audio.recordings import Recording, TemporaryPath, write_features
from server.model_facts import TRANSCRIPTION, Facts
from server.speech.speech_model import Draw, Piece, SpeechText
from server.speech.transcribe import TranscriptionJob
from server.speech.transcription import Asked
from server.speech.vocabulary import SpeechTokens
from server.text.tokenizer import Tokenizer

KNOWN = SpeechTokens(
    start=300,
    end=EOS,
    previous=301,
    no_speech=302,
    no_timestamps=320,
    languages={"en": 310, "de": 311},
    tasks={"transcribe": 312, "translate": 313},
)


def says(text: str) -> Script:
    """A model that closes one segment with this text in each piece."""

    def script(_: list[int], __: Draw, piece: Piece) -> Sequence[int]:
        return [KNOWN.first_timestamp, *text.encode(), KNOWN.first_timestamp + piece.frames // 2]

    return script


class _Bytes(ScriptedEngine):
    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    def text(self) -> SpeechText:
        return _ByteText()


class _ByteText:
    def push(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()

    def flush(self) -> str:
        return ""


class FakeTranscriber(Transcriber):
    """Reads recordings in the process of the test."""

    def __init__(
        self, frontend: FakeFrontend, script: Script, most: int = 1 << 20, seconds: float = 90.0
    ) -> None:
        self.known, self._metrics = KNOWN, frontend.metrics
        self.engine = _Bytes(script, language=311)
        self.engine.end = EOS
        self.most_bytes, self.seconds = most, seconds
        self.open = 0
        """The recordings that are open."""
        self.asked: list[Asked] = []

    @asynccontextmanager
    async def opened(
        self, upload: TemporaryPath, digest: bytes, owner: str = ""
    ) -> AsyncGenerator[Recording]:
        with TemporaryPath() as target:
            with open(upload.path, "rb") as source:
                heard = write_features(decode_audio(source, self.seconds), 80, target.file)
            self.open += 1
            try:
                yield Recording(heard, 80, target.file, digest)
            finally:
                self.open -= 1

    def job(
        self,
        recording: Recording,
        asked: Asked,
        facts: Facts,
        tokenizer: Tokenizer,
        admission: Admission,
        options: Callable[[], AddOptions],
    ) -> TranscriptionJob:
        self.asked.append(asked)
        assert not options().get("salt")
        return TranscriptionJob(self.engine, self.known, recording, asked, admission.count)


def let_transcribe(frontend: FakeFrontend, script: Script, **bounds: float) -> FakeTranscriber:
    """Lets a frontend transcribe, and nothing else."""
    frontend.serve(TRANSCRIPTION, "align")
    transcriber = FakeTranscriber(frontend, script, **bounds)  # pyright: ignore[reportArgumentType]
    frontend.transcriber = transcriber
    return transcriber
