"""Writes transcripts anew: python tests/bench/write_transcripts.py [fake] [demo] [decoder] [several]

The requests in tests/transcripts stay, and get the answers that the server gives now. Read the difference
before you keep it (`git diff --word-diff tests/transcripts`): each changed line is a promise to clients that
changes. A new case is a line without an answer.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import fake_transcripts
import live_transcripts
import transcripts


def main() -> None:
    for name in sys.argv[1:] or transcripts.names():
        with tempfile.TemporaryDirectory() as folder:
            cases = transcripts.read(name)
            if name in live_transcripts.SERVERS:
                with live_transcripts.started(name, Path(folder)) as server:
                    answered = list(live_transcripts.replay(cases, server))
            else:
                answered = asyncio.run(fake_transcripts.replay(cases, Path(folder)))
        pairs = list(zip(cases, answered, strict=True))
        differ = [any(transcripts.differences(*pair)) for pair in pairs]
        transcripts.write(name, [pair[changed] for pair, changed in zip(pairs, differ, strict=True)])
        print(f"{name}: {sum(differ)} of {len(cases)} answers changed")


if __name__ == "__main__":
    main()
