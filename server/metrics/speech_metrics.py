"""The metrics of transcriptions, which servers have whose models read recordings."""

from __future__ import annotations

from server.metrics.media_metrics import Counts, Observes


class SpeechMetrics:
    """Counts what transcriptions take."""

    def __init__(self, seconds: Counts, pieces: Counts, retries: Counts, factor: Observes) -> None:
        self._seconds, self._pieces, self._retries, self._factor = seconds, pieces, retries, factor

    def count(self, seconds: float, pieces: int, retries: int, took: float) -> None:
        """Count a recording of so many seconds, which took so many others."""
        self._seconds.inc(seconds)
        self._pieces.inc(pieces)
        self._retries.inc(retries)
        self._factor.observe(took / max(seconds, 0.01))
