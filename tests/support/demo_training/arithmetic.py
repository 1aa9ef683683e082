"""Numbers as English words, and the sums that the demo model learns."""

import random
from typing import NamedTuple

from demo_training.facts import SMALL_NUMBERS, TENS, WORDINGS


def in_words(number: int) -> str:
    if number < 0:
        return "minus " + in_words(-number)
    if number < 20:
        return SMALL_NUMBERS[number]
    if number < 100:
        tens, ones = TENS[number // 10 - 2], number % 10
        return f"{tens}-{SMALL_NUMBERS[ones]}" if ones else tens
    hundreds, rest = f"{in_words(number // 100)} hundred", number % 100
    return f"{hundreds} and {in_words(rest)}" if rest else hundreds


class Sum(NamedTuple):
    left: int
    operator: str  # + - * /
    right: int

    @property
    def result(self) -> int:
        match self.operator:
            case "+":
                return self.left + self.right
            case "-":
                return self.left - self.right
            case "*":
                return self.left * self.right
            case _:
                return self.left // self.right


SPOKEN = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}

_PHRASINGS = {operator: WORDINGS[f"sum with {operator}"] for operator in SPOKEN}

_FRAMES = WORDINGS["sum"]

# Training never uses these: they measure whether more than the wordings was learned.
UNSEEN_FRAMES = WORDINGS["sum, unseen"]


def is_held_out(a: int, b: int) -> bool:
    """A tenth of the additions and subtractions of larger numbers is never trained."""
    return a > 20 and b > 20 and (a * 31 + b * 17) % 10 == 0


def random_sum(rng: random.Random) -> Sum:
    operator = rng.choices("+-*/", (50, 27, 20, 3))[0]
    if operator == "*":
        return Sum(rng.randint(0, 12), "*", rng.randint(0, 12))
    if operator == "/":
        right = rng.randint(1, 10)
        return Sum(right * rng.randint(0, 10), "/", right)
    top = rng.choices((10, 20, 99), (45, 40, 15))[0]
    a, b = rng.randint(0, top), rng.randint(0, top)
    while is_held_out(a, b):
        a, b = rng.randint(0, top), rng.randint(0, top)
    if operator == "-" and a < b and rng.random() < 0.9:
        a, b = b, a
    return Sum(a, operator, b)


def spoken(task: Sum, words: bool) -> str:
    if words:
        return f"{in_words(task.left)} {SPOKEN[task.operator]} {in_words(task.right)}"
    return f"{task.left} {SPOKEN[task.operator]} {task.right}"


def written(task: Sum, gap: str = " ") -> str:
    return f"{task.left}{gap}{task.operator}{gap}{task.right}"


def spoken_answer(task: Sum, words: bool) -> str:
    result = in_words(task.result) if words else str(task.result)
    answer = f"{spoken(task, words)} is {result}."
    return answer[0].upper() + answer[1:]


def question_and_answer(rng: random.Random) -> tuple[str, str]:
    """Make a sum in one of many wordings, and an answer that repeats it in the notation of the question."""
    return ask(rng, random_sum(rng))


def ask(rng: random.Random, task: Sum) -> tuple[str, str]:
    """Ask for this sum in one of many wordings; returns the answer too."""
    style = rng.random()
    if style < 0.2:
        a, b = (in_words(task.left), in_words(task.right)) if style < 0.05 else (task.left, task.right)
        question = rng.choice(_PHRASINGS[task.operator]).format(a=a, b=b)
        return question[0].upper() + question[1:], spoken_answer(task, words=style < 0.05)
    if style < 0.5:
        gap = rng.choice(("", " "))
        question = rng.choice((*_FRAMES, "{sum} =", "{sum}=", "{sum} = ?")).format(sum=written(task, gap))
        return question, f"{written(task)} = {task.result}."
    words = style > 0.7
    question = rng.choice(_FRAMES).format(sum=spoken(task, words))
    return question[0].upper() + question[1:], spoken_answer(task, words)


def worked_out(task: Sum) -> str:
    """The way to the result, column by column where it has several."""
    a, operator, b = task
    if operator not in "+-" or max(a, b) < 10 or (a < b and operator == "-"):
        return f"{written(task)} = {task.result}."
    (tens, ones), (other_tens, other_ones), result = divmod(a, 10), divmod(b, 10), task.result // 10
    if operator == "+":
        carry = " + 1" if ones + other_ones > 9 else ""
        columns = f"{ones} + {other_ones} = {ones + other_ones}, {tens} + {other_tens}{carry} = {result}"
    else:
        borrows = ones < other_ones
        ones, borrow = (ones + 10, " - 1") if borrows else (ones, "")
        columns = f"{ones} - {other_ones} = {ones - other_ones}, {tens} - {other_tens}{borrow} = {result}"
    return f"{written(task)}: {columns}, so {task.result}."
