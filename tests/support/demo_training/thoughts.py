"""What the demo model thinks before an answer: sums column by column, a remark on the question elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable

from demo_training import arithmetic, skills
from demo_training.skills import Turns
from demo_training.tools import ToolUse

Random = random.Random

_LONGEST = 60
"""The most characters of an answer that a thought says first."""

_REMARKS: dict[Callable[[Random], Turns], str] = {
    skills.capital: "The user asks for a capital.",
    skills.country_of_capital: "The user names a capital and asks for its country.",
    skills.check_capital: "I must check a capital.",
    skills.continent: "The user asks where a country is.",
    skills.unknown_capital: "I must say that I do not know this country.",
    skills.word_problem: "This is a sum in a little story.",
    skills.compare: "I must look at the numbers.",
    skills.count: "The user wants me to count.",
    skills.calendar: "This is about the calendar.",
    skills.opposite: "The user asks for an opposite.",
    skills.sound: "This is about the sound of an animal.",
    skills.spell: "The user wants me to spell a word.",
    skills.listing: "The user wants a list.",
    skills.general: "The user asks for a fact.",
    skills.about: "The user asks about me or the server.",
    skills.small_talk: "The user is talking to me. I answer kindly.",
    skills.languages: "This is about a language.",
    skills.emoji: "The user wants an emoji.",
    skills.unknown: "I do not know this, and must say so.",
    skills.echo: "The user wants me to repeat a text.",
    skills.make_json: "The user wants JSON.",
    skills.story: "The user wants a story.",
}
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
    kinds = [kind for kind in skills.SKILLS if kind[0] in _REMARKS]
    skill, _, may_vary = rng.choices(kinds, [weight for _, weight, _ in kinds])[0]
    question, answer = skill(rng)[0]
    says = len(answer) <= _LONGEST and skill not in _NOT_REPEATED
    thought = f"{_REMARKS[skill]} {answer}" if says else _REMARKS[skill]
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
