"""The demo model's corpus: endless documents made of the tables and skills, always the same for a seed.

A document is a conversation, as messages, or a plain text. Nothing here knows tokens or the chat template.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from demo_training import arithmetic, thoughts, tools
from demo_training.facts import ABOUT, ANIMALS, COUNTRIES, DAYS, GENERAL, LANGUAGES, MONTHS, NAMES, WORDINGS
from demo_training.skills import SKILLS, Turns, made_up_word, tell

Random = random.Random
Json = dict[str, object]
Message = Json


@dataclass(frozen=True, slots=True)
class Document:
    messages: list[Message] = field(default_factory=list)
    tools: list[Json] = field(default_factory=list)
    # A plain document has no messages but pairs of texts: the first is given, the second is to be learned.
    pieces: list[tuple[str, str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(given + learned for given, learned in self.pieces)


_SYSTEM_PROMPTS = WORDINGS["system prompt"]
_OPENINGS = (
    "Hi, ",
    "Hello! ",
    "Hey, ",
    "Please: ",
    "OK, ",
    "So, ",
    "Question: ",
    "Now tell me: ",
    "Quick one: ",
)
_CLOSINGS = (" Thanks!", " Thank you.", " please", " Please.", " 🙂", " Answer in one sentence.")


def documents(seed: int) -> Iterator[Document]:
    rng = Random(seed)
    makers = (_conversation, _tool_conversation, _plain, _sums, _thinking)
    while True:
        yield rng.choices(makers, (68, 8, 10, 14, 60))[0](rng)


def _conversation(rng: Random) -> Document:
    turns: Turns = []
    for _ in range(rng.choices((1, 2, 3, 5, 8), (45, 20, 15, 12, 8))[0]):
        turns += _exchange(rng)
    if rng.random() < 0.2:
        turns = _with_a_name(rng, turns)
    return Document(messages=_system(rng) + _messages(turns))


def _exchange(rng: Random) -> Turns:
    skill, _, may_vary = rng.choices(SKILLS, [weight for _, weight, _ in SKILLS])[0]
    turns = skill(rng)
    return [(vary(rng, question), answer) for question, answer in turns] if may_vary else turns


def _with_a_name(rng: Random, turns: Turns) -> Turns:
    """Let the user say a name at the start and ask for it at the end, or ask without having said it."""
    question = rng.choice(("What is my name?", "Do you know my name?", "Who am I?", "What's my name?"))
    if rng.random() < 0.2:
        return [*turns, (question, "You have not told me your name.")]
    name = rng.choice((*NAMES, made_up_word(rng).capitalize(), made_up_word(rng).capitalize()))
    hello = rng.choice(
        ("My name is {0}.", "I am {0}.", "Hello, my name is {0}.", "Hi! I'm {0}.", "Call me {0}.")
    )
    return [(hello.format(name), f"Nice to meet you, {name}!"), *turns, (question, f"Your name is {name}.")]


def _tool_conversation(rng: Random) -> Document:
    """Make a conversation with tools; most of its questions need one of them, some do not."""
    uses = [make(rng) for make in rng.sample(tools.TOOLS, rng.choice((1, 1, 1, 2, 3)))]
    offered = {use.name: use.schema for use in uses}
    messages: list[Message] = []
    for _ in range(rng.choice((1, 1, 2))):
        if rng.random() < 0.3:
            messages += _messages(_exchange(rng))
        else:
            messages += _tool_messages(rng.choice(uses))
    return Document(messages=_system(rng) + messages, tools=list(offered.values()))


def _tool_messages(use: tools.ToolUse) -> list[Message]:
    call = {"type": "function", "function": {"name": use.name, "arguments": use.arguments}}
    return [
        {"role": "user", "content": use.question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": use.result},
        {"role": "assistant", "content": use.answer},
    ]


def _thinking(rng: Random) -> Document:
    """Make a conversation whose last answer comes with the reasoning before it."""
    before = _messages(_exchange(rng)) if rng.random() < 0.2 else []
    if rng.random() < 0.2:
        use = rng.choice(tools.TOOLS)(rng)
        asked, call, result, answer = _tool_messages(use)
        call["reasoning_content"] = thoughts.before_call(use)
        answer["reasoning_content"] = thoughts.after_result(use)
        return Document(messages=_system(rng) + before + [asked, call, result, answer], tools=[use.schema])
    question, thought, answer = thoughts.exchange(rng, vary)
    last: list[Message] = [
        {"role": "user", "content": question},
        {"role": "assistant", "reasoning_content": thought, "content": answer},
    ]
    return Document(messages=_system(rng) + before + last)


def _system(rng: Random) -> list[Message]:
    if rng.random() < 0.6:
        return []
    return [{"role": "system", "content": rng.choice(_SYSTEM_PROMPTS)}]


def _messages(turns: Turns) -> list[Message]:
    return [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]


def vary(rng: Random, question: str) -> str:
    """Type the question as careless people do."""
    if rng.random() < 0.4:
        return question
    if rng.random() < 0.1:
        question = rng.choice(_OPENINGS) + question[0].lower() + question[1:]
    if rng.random() < 0.1:
        question += rng.choice(_CLOSINGS)
    if rng.random() < 0.35:
        question = question.rstrip(".?!")
    if rng.random() < 0.1:
        question += rng.choice(("?", "??", "!", "?!", "...", " ?", "\n", " "))
    case = rng.random()
    if case < 0.3:
        return question.lower()
    return question.upper() if case < 0.5 else question


def _plain(rng: Random) -> Document:
    kind = rng.choices(("facts", "story", "hello", "lists", "fox"), (60, 15, 12, 10, 2))[0]
    match kind:
        case "facts":
            text = " ".join(_fact(rng) for _ in range(rng.choice((1, 1, 2, 4))))
        case "story":
            text = tell(rng, rng.choice(ANIMALS))
        case "hello":
            home, animal = rng.choice(COUNTRIES).capital, rng.choice(ANIMALS)
            text = f"Hello, my name is {rng.choice(NAMES)} and I live in {home}. I like {animal}s."
        case "lists":
            numbers = [str(number) for number in range(1, rng.randint(5, 20) + 1)]
            text = ", ".join(rng.choice((DAYS, MONTHS, numbers))) + "."
        case _:
            text = "The quick brown fox jumps over the lazy dog."
    return Document(pieces=[("", text)])


def _sums(rng: Random) -> Document:
    """Make many sums in one notation, of which only the results are learned, so that each token teaches."""
    sums = [arithmetic.random_sum(rng) for _ in range(rng.choice((1, 2, 12, 24)))]
    notation = rng.random()
    if notation < 0.5:
        pieces = [(arithmetic.written(task), f" = {task.result}") for task in sums]
    else:
        lines = [arithmetic.spoken_answer(task, words=notation > 0.7) for task in sums]
        pieces = [(given, f" is {result}") for given, result in (line.split(" is ") for line in lines)]
    return Document(pieces=[(given, learned + "\n") for given, learned in pieces])


def _fact(rng: Random) -> str:
    kind = rng.random()
    country = rng.choice(COUNTRIES)
    if kind < 0.5:
        return f"The capital of {country.name} is {country.capital.removesuffix('.')}."
    if kind < 0.6:
        return f"{country.capital} is the capital of {country.name}."
    if kind < 0.7:
        return f"{country.name[0].upper()}{country.name[1:]} is in {country.continent}."
    if kind < 0.8:
        return rng.choice(GENERAL).answer
    if kind < 0.95:
        return rng.choice(ABOUT).answer
    return rng.choice(list(LANGUAGES.values()))["hello"]
