"""What the demo model thinks before an answer: sums column by column, a remark on the question elsewhere."""

import random
from collections.abc import Callable

from demo_training import arithmetic, skills
from demo_training.facts import REMARKS
from demo_training.tools import ToolUse

Random = random.Random

_LONGEST = 60
"""The most characters of an answer that a thought says first."""

_NOT_REPEATED = frozenset(
    {skills.unknown, skills.echo, skills.make_json, skills.story, skills.count, skills.spell, skills.listing}
)
"""Skills whose answer no thought says first."""


def exchange(rng: Random, vary: Callable[[Random, str], str]) -> tuple[str, str, str]:
    """Make a question, a thought and the answer; half are sums. `vary` types a question as people do."""
    if rng.random() < 0.5:
        task = _sum(rng)
        question, answer = arithmetic.ask(rng, task)
        return vary(rng, question), arithmetic.worked_out(task), answer
    kinds = [kind for kind in skills.SKILLS if kind[0].__name__ in REMARKS]
    skill, _, may_vary = rng.choices(kinds, [weight for _, weight, _ in kinds])[0]
    question, answer = skill(rng)[0]
    says = len(answer) <= _LONGEST and skill not in _NOT_REPEATED
    thought = f"{REMARKS[skill.__name__]} {answer}" if says else REMARKS[skill.__name__]
    return vary(rng, question) if may_vary else question, thought, answer


def before_call(use: ToolUse) -> str:
    return f"I need {use.name} for this."


def after_result(use: ToolUse) -> str:
    return f"{use.name} has answered. I tell the user."


def _sum(rng: Random) -> arithmetic.Sum:
    """Make a sum, more often of larger numbers than without thinking, because there thoughts help."""
    while True:
        task = arithmetic.random_sum(rng)
        if max(task.left, task.right) > 20 or rng.random() < 0.3:
            return task
