"""Numbers as English words, and the sums that the demo model learns."""

from __future__ import annotations

import random
from typing import NamedTuple

_SMALL = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def in_words(number: int) -> str:
    if number < 0:
        return "minus " + in_words(-number)
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens, ones = _TENS[number // 10 - 2], number % 10
        return f"{tens}-{_SMALL[ones]}" if ones else tens
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

_PHRASINGS = {
    "+": (
        "Add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "What do you get if you add {a} to {b}?",
        "{a} and {b} together?",
        "What do {a} and {b} make?",
        "How much is {a} and {b}?",
    ),
    "-": (
        "Take {b} from {a}.",
        "Subtract {b} from {a}.",
        "What is left if you take {b} from {a}?",
        "What is the difference between {a} and {b}?",
        "What is {a} less {b}?",
    ),
    "*": ("Multiply {a} by {b}.", "What is the product of {a} and {b}?", "What is {a} multiplied by {b}?"),
    "/": ("Divide {a} by {b}.", "What is {a} over {b}?"),
}

_FRAMES = (
    "What is {sum}?",
    "What is {sum}?",
    "How much is {sum}?",
    "What does {sum} make?",
    "Calculate {sum}.",
    "Compute {sum}.",
    "{sum}?",
    "{sum}",
    "{sum} is?",
    "What's {sum}?",
    "Tell me what {sum} is.",
    "Do you know what {sum} is?",
    "Can you tell me {sum}?",
    "What is the result of {sum}?",
    "I need to know {sum}.",
    "Solve {sum}.",
)

# Training never uses these: they measure whether more than the wordings was learned.
UNSEEN_FRAMES = ("Could you work out {sum} for me?", "What would {sum} be?", "Give me the answer to {sum}.")


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
