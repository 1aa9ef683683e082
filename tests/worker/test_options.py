"""What the options of a worker take."""

from __future__ import annotations

from typing import get_type_hints

from models.quantization.config import MADE_ON_LOADING, METHODS
from worker.options import Doc, WorkerOptions


def test_every_method_of_checkpoints_can_be_named() -> None:
    hint = get_type_hints(WorkerOptions, include_extras=True)["quantization"]
    (doc,) = [entry for entry in hint.__metadata__ if isinstance(entry, Doc)]
    assert {*METHODS, *MADE_ON_LOADING} <= set(doc.choices)
