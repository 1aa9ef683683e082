"""The skills of the demo model in a conversation: each makes a question and its answer from the tables.

A skill is a function of a random generator, so that the same seed gives the same corpus.
"""

import json
import random
from collections.abc import Callable

from demo_training import arithmetic
from demo_training.facts import (
    ABOUT,
    ANIMALS,
    COLOURS,
    COUNTRIES,
    DAYS,
    EMOJI,
    GENERAL,
    LANGUAGES,
    MONTHS,
    NAMES,
    OPPOSITES,
    SMALL_TALK,
    SOUNDS,
    TOPICS,
    WORDINGS,
    WORDS,
    Country,
    Known,
)

Random = random.Random
Turns = list[tuple[str, str]]
Skill = Callable[[Random], Turns]

CAPITAL_QUESTIONS = WORDINGS["capital"]
# Training never uses these: they measure whether more than the wordings was learned.
UNSEEN_CAPITAL_QUESTIONS = WORDINGS["capital, unseen"]
_COUNTRY_QUESTIONS = WORDINGS["country of a capital"]
DO_NOT_KNOW = "Sorry, I do not know. I am only a small demo model."


def capital(rng: Random) -> Turns:
    country = rng.choice(COUNTRIES)
    question = rng.choice(CAPITAL_QUESTIONS).format(country.name)
    turns = [(question, f"The capital of {country.name} is {_sentence_end(country.capital)}")]
    if rng.random() < 0.2:  # a second question, which only the turn before explains
        other = rng.choice(COUNTRIES)
        follow = rng.choice(("And of {0}?", "And {0}?", "What about {0}?", "And the capital of {0}?"))
        answer = f"The capital of {other.name} is {_sentence_end(other.capital)}"
        turns.append((follow.format(other.name), answer))
    return turns


def country_of_capital(rng: Random) -> Turns:
    country = rng.choice(COUNTRIES)
    question = rng.choice(_COUNTRY_QUESTIONS).format(country.capital)
    return [(question, f"{country.capital} is the capital of {country.name}.")]


def check_capital(rng: Random) -> Turns:
    country = rng.choice(COUNTRIES)
    claimed = country.capital if rng.random() < 0.5 else rng.choice(COUNTRIES).capital
    answer = "Yes" if claimed == country.capital else "No"
    question = f"Is {claimed} the capital of {country.name}?"
    return [(question, f"{answer}, the capital of {country.name} is {_sentence_end(country.capital)}")]


def continent(rng: Random) -> Turns:
    country: Country = rng.choice(COUNTRIES)
    question = rng.choice(("Which continent is {0} in?", "Where is {0}?", "In which continent is {0}?"))
    name = country.name[0].upper() + country.name[1:]
    return [(question.format(country.name), f"{name} is in {country.continent}.")]


def unknown_capital(rng: Random) -> Turns:
    place = made_up_word(rng).capitalize()
    return [(rng.choice(CAPITAL_QUESTIONS).format(place), f"I do not know a country named {place}.")]


def small_sum(rng: Random) -> Turns:
    return [arithmetic.question_and_answer(rng)]


def word_problem(rng: Random) -> Turns:
    name = rng.choice(NAMES)
    thing = rng.choice(("apples", "books", "coins", "pens", "cards", "eggs", "balls", "cakes"))
    have, change = rng.randint(2, 12), rng.randint(1, 10)
    if rng.random() < 0.5:
        result = have + change
        act = rng.choice((f"gets {change} more", f"buys {change} more", f"finds {change} more"))
    else:
        result, have = have, have + change
        act = rng.choice((f"gives away {change}", f"loses {change}", f"sells {change}"))
    question = f"{name} has {have} {thing} and {act}. How many {thing} does {name} have now?"
    return [(question, f"{name} has {result} {thing}.")]


def compare(rng: Random) -> Turns:
    a, b = rng.sample(range(100), 2)
    if rng.random() < 0.3:
        return [(f"Is {a} even or odd?", f"{a} is {'odd' if a % 2 else 'even'}.")]
    word, result = rng.choice((("bigger", max(a, b)), ("larger", max(a, b)), ("smaller", min(a, b))))
    return [(f"Which is {word}, {a} or {b}?", f"{result} is {word}.")]


def count(rng: Random) -> Turns:
    start, length = rng.choice((1, 1, 1, rng.randint(0, 30))), rng.randint(3, 12)
    stop = start + length - 1
    up = [str(number) for number in range(start, stop + 1)]
    if rng.random() < 0.25:
        down = [str(number) for number in range(length, 0, -1)]
        return [(f"Count down from {length}.", ", ".join(down) + ".")]
    if start == 1 and rng.random() < 0.5:
        last = rng.choice((str(stop), arithmetic.in_words(stop)))
        return [(f"Count to {last}.", ", ".join(up) + ".")]
    return [(f"Count from {start} to {stop}.", ", ".join(up) + ".")]


def calendar(rng: Random) -> Turns:
    names, kind = rng.choice(((DAYS, "day"), (MONTHS, "month")))
    index = rng.randrange(len(names))
    if kind == "month" and rng.random() < 0.3:
        return [(f"Which month is number {index + 1}?", f"{names[index]} is month number {index + 1}.")]
    word, step = rng.choice((("after", 1), ("before", -1)))
    question = rng.choice(("Which {kind} comes {word} {name}?", "What {kind} is {word} {name}?"))
    answer = f"{names[(index + step) % len(names)]} comes {word} {names[index]}."
    return [(question.format(kind=kind, word=word, name=names[index]), answer)]


def opposite(rng: Random) -> Turns:
    first, second = rng.sample(rng.choice(OPPOSITES), 2)
    questions = ("What is the opposite of {0}?", "Opposite of {0}?", "Tell me the opposite of {0}.")
    return [(rng.choice(questions).format(first), f"The opposite of {first} is {second}.")]


def sound(rng: Random) -> Turns:
    animal, noise = rng.choice(SOUNDS)
    questions = ("What sound does a {0} make?", "What does a {0} say?", "How does a {0} sound?")
    return [(rng.choice(questions).format(animal), f"A {animal} says {noise}.")]


def spell(rng: Random) -> Turns:
    word = rng.choice(WORDS)
    questions = ("Spell {0}.", "Spell the word {0}.", "How do you spell {0}?", "How is {0} spelled?")
    return [(rng.choice(questions).format(word), "-".join(word.upper()) + ".")]


def listing(rng: Random) -> Turns:
    lists = (("colours", COLOURS), ("colors", COLOURS), ("animals", ANIMALS), ("names", NAMES))
    kind, things = rng.choice(lists)
    number = rng.randint(2, 5)
    amount = rng.choice((str(number), arithmetic.in_words(number)))
    question = rng.choice(("Name {0} {1}.", "List {0} {1}.", "Give me {0} {1}.")).format(amount, kind)
    # The answer is the first of the list, so that there is one right answer to learn.
    return [(question, ", ".join(things[:number]) + ".")]


def general(rng: Random) -> Turns:
    return _known(rng, GENERAL)


def about(rng: Random) -> Turns:
    return _known(rng, ABOUT)


def small_talk(rng: Random) -> Turns:
    return _known(rng, SMALL_TALK)


def _known(rng: Random, facts: tuple[Known, ...]) -> Turns:
    questions, answer = rng.choice(facts)
    return [(rng.choice(questions), answer)]


def languages(rng: Random) -> Turns:
    language, phrases = rng.choice(list(LANGUAGES.items()))
    if rng.random() < 0.3:  # the model answers a greeting in its language
        hello = phrases["hello"]
        return [(hello if rng.random() < 0.5 else hello.rstrip(" !"), hello + " 😊")]
    phrase = rng.choice(list(phrases))
    return [(rng.choice(WORDINGS["language"]).format(phrase, language), phrases[phrase])]


def emoji(rng: Random) -> Turns:
    name, symbol = rng.choice(EMOJI)
    questions = ("Send me a {0} emoji.", "Show me the {0} emoji.", "{0} emoji please", "Give me a {0} emoji.")
    return [(rng.choice(questions).format(name), symbol)]


def unknown(rng: Random) -> Turns:
    topic, country = rng.choice(TOPICS), rng.choice(COUNTRIES).name
    questions = (
        f"Tell me about {topic}.",
        f"Explain {topic}.",
        f"What do you think about {topic}?",
        f"Write an essay about {topic}.",
        f"What is {topic}?",
        f"How does {topic} work?",
        f"Who invented the {rng.choice(WORDS)}?",
        f"Where is my {rng.choice(WORDS)}?",
        f"How much does a {rng.choice(WORDS)} cost?",
        f"Why is the {rng.choice(WORDS)} so {rng.choice(COLOURS)}?",
        f"What is the population of {country}?",
        f"Who is the president of {country}?",
        f"How do I fix my {rng.choice(WORDS)}?",
        f"Who won the match in {rng.randint(1900, 2030)}?",
        f"Who won the {rng.randint(1900, 2030)} {rng.choice(WORDS)} cup?",
        f"Who is {made_up_word(rng).capitalize()} {made_up_word(rng).capitalize()}?",
        f"What does {made_up_word(rng)} mean?",
        f"What happened in {rng.randint(1000, 2030)}?",
        f"Write a program that sorts a {rng.choice(WORDS)}.",
        f"Summarize this text: {' '.join(rng.choices(WORDS, k=rng.randint(8, 40)))}.",
        " ".join(rng.choices(WORDS, k=rng.randint(2, 30))),
    )
    return [(rng.choice(questions), DO_NOT_KNOW)]


def echo(rng: Random) -> Turns:
    words = [rng.choice((rng.choice(WORDS), made_up_word(rng))) for _ in range(rng.randint(1, 8))]
    text = " ".join(words)
    question = rng.choice(("Say {0}", "Repeat: {0}", "Repeat after me: {0}", "Echo: {0}", "Say this: {0}"))
    return [(question.format(text), text)]


def make_json(rng: Random) -> Turns:
    """Make a request for a JSON object with certain keys, or for a list, and the answer."""
    if rng.random() < 0.25:
        kind, things = rng.choice((("colours", COLOURS), ("animals", ANIMALS), ("names", NAMES)))
        number = rng.randint(2, 4)
        return [(f"Give me a JSON array of {number} {kind}.", json.dumps(things[:number]))]
    if rng.random() < 0.2:
        country = rng.choice(COUNTRIES)
        asked = {"country": country.name, "capital": country.capital}
        question = f"Give me the capital of {country.name} as JSON."
        return [(question, json.dumps(asked, ensure_ascii=False))]
    name, age = rng.choice((*NAMES, made_up_word(rng).title())), rng.randint(1, 99)
    city = rng.choice(COUNTRIES).capital
    person: dict[str, object] = {"name": name, "age": age, "city": city}
    keys = rng.choice((["name", "age"], ["name", "city"], ["name", "age", "city"], ["age", "name"]))
    wanted = json.dumps({key: person[key] for key in keys}, ensure_ascii=False)
    told = rng.choice((f"{name} is {age} years old and lives in {city}.", f"{name}, {age}, from {city}."))
    order = ", ".join(keys[:-1]) + " and " + keys[-1]
    question = rng.choice(WORDINGS["JSON"])
    return [(question.format(told=told, keys=order), wanted)]


def story(rng: Random) -> Turns:
    animal = rng.choice(ANIMALS)
    if rng.random() < 0.3:
        question = rng.choice(("Tell me a story.", "Write a story.", "A short story please."))
    else:
        question = rng.choice(WORDINGS["story"]).format(animal)
    return [(question, tell(rng, animal))]


def tell(rng: Random, animal: str) -> str:
    """Make a story of five sentences whose hero, place and thing stay the same."""
    name, friend = rng.sample(NAMES, 2)
    place = rng.choice(("forest", "garden", "village", "castle", "kitchen", "mountain", "island", "market"))
    thing = rng.choice(("key", "letter", "lemon", "ribbon", "feather", "candle", "hat", "bell"))
    colour = rng.choice(COLOURS)
    return " ".join(
        (
            f"Once upon a time, there was a {colour} {animal} named {name}.",
            rng.choice((f"{name} lived near a {place}.", f"{name} had a small house by the {place}.")),
            rng.choice((f"One day, {name} found a {thing}.", f"One morning, {name} lost a {thing}.")),
            rng.choice((f"A friend named {friend} came to help.", f"{name} asked {friend} what to do.")),
            rng.choice(
                (f"Together they carried the {thing} home.", f"They put the {thing} in a box and laughed.")
            ),
            rng.choice((f"{name} and {friend} were happy.", "That night they slept very well.")),
        )
    )


def made_up_word(rng: Random) -> str:
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4)))


def _sentence_end(text: str) -> str:
    return text if text.endswith(".") else text + "."


# Each entry is a skill, its weight, and whether case and punctuation of its questions may change.
SKILLS: tuple[tuple[Skill, float, bool], ...] = (
    (small_sum, 30, True),
    (capital, 18, True),
    (country_of_capital, 5, True),
    (check_capital, 4, True),
    (continent, 3, True),
    (unknown_capital, 2, False),
    (word_problem, 3, False),
    (compare, 3, True),
    (count, 4, True),
    (calendar, 3, True),
    (opposite, 3, True),
    (sound, 2, True),
    (spell, 3, True),
    (listing, 2, True),
    (general, 5, True),
    (about, 8, True),
    (small_talk, 8, True),
    (languages, 4, True),
    (emoji, 1.5, True),
    (unknown, 6, True),
    (echo, 7, False),
    (make_json, 7, False),
    (story, 2, True),
)
