"""`LLM.decide` and `AsyncLLM.decide`: typed questions of a program, read by what reads those of HTTP."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from server.access.request_state import RequestState
from server.frontend.asks.deciding import Decide
from server.frontend.asks.parts import Terms
from server.frontend.frontend import Frontend
from server.media.inline_files import InlineFiles
from server.model_facts import GENERATE, require_task
from server.offline.program_requests import adapted, all_of, read_prepared
from server.offline.prompt_forms import LoRARequest, validated
from server.reading.decisions import read_decisions
from server.schemas.decisions.openai_decisions import Decision, DecisionRequest, write_decision

State = str | Sequence[Mapping[str, Any]]
"""A text, or the items of a conversation as /v1/decisions has them."""
AT_ONCE = 4
"""The texts of a call that are decided about at a time, each with all of its questions."""


async def decide(
    frontend: Frontend,
    states: State | Sequence[State],
    questions: Sequence[Mapping[str, Any]],
    adapter: LoRARequest | None = None,
    name: str = "",
) -> list[Decision]:
    """Answers the same questions about each text, in order. Raises ApiError."""
    [own] = await adapted(frontend, [adapter])
    require_task(GENERATE, own.facts.tasks)
    several = not isinstance(states, str) and not all(isinstance(one, Mapping) for one in states)
    given = states if several else [states]
    bodies = [
        validated(DecisionRequest, {"input": one, "questions": [dict(each) for each in questions]})
        for one in given
    ]
    return await all_of([_decide(own, body, name) for body in bodies], AT_ONCE)


async def _decide(frontend: Frontend, body: DecisionRequest, name: str) -> Decision:
    with closing(RequestState(frontend=frontend, inline_files=InlineFiles())) as state:
        read = await read_prepared(state, partial(read_decisions, body))
        terms = Terms(state, name, int(time.time()), shares_id=True)
        answer = await frontend.ask(Decide(terms=terms, read=read))
    counts = answer.end.counts
    return write_decision(answer.head.model, answer.decided, counts.prompt, counts.cached)
