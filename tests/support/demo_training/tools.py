"""Tool calls for the demo model: functions, questions that need them, and answers made of the results."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from demo_training.facts import COUNTRIES, NAMES, WORDINGS, WORDS

Random = random.Random
Json = dict[str, object]

_KINDS = {str: "string", int: "integer", bool: "boolean"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One function, a question that needs it, the call, its result and the answer made of it."""

    schema: Json
    question: str
    name: str
    arguments: Json
    result: str
    answer: str


def _use(name: str, about: str, question: str, arguments: Json, result: Json, answer: str) -> ToolUse:
    """A function takes just the arguments of its call; all of them are required."""
    parameters: Json = {
        "type": "object",
        "properties": {key: {"type": _KINDS[type(value)]} for key, value in arguments.items()},
        "required": list(arguments),
    }
    function: Json = {"name": name, "description": about, "parameters": parameters}
    schema: Json = {"type": "function", "function": function}
    return ToolUse(schema, question, name, arguments, json.dumps(result), answer)


def weather(rng: Random) -> ToolUse:
    name = rng.choice(("get_weather", "get_weather", "weather", "get_current_weather", "fetch_weather"))
    key, city = rng.choice(("city", "location", "city", "place")), rng.choice(COUNTRIES).capital
    degrees, sky = rng.randint(-5, 35), rng.choice(("sunny", "cloudy", "rainy", "windy", "snowy"))
    question = rng.choice(WORDINGS["weather"]).format(city)
    about = rng.choice(("Get the weather", "Get the current weather in a city"))
    result: Json = {"temperature": degrees, "condition": sky}
    return _use(name, about, question, {key: city}, result, f"It is {degrees} degrees and {sky} in {city}.")


def clock(rng: Random) -> ToolUse:
    name, key = rng.choice(("get_time", "current_time", "clock")), rng.choice(("city", "location", "place"))
    city, time = rng.choice(COUNTRIES).capital, f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    question = rng.choice(("What time is it in {0}?", "Tell me the time in {0}.", "How late is it in {0}?"))
    answer = f"It is {time} in {city}."
    return _use(name, "Get the local time", question.format(city), {key: city}, {"time": time}, answer)


def adder(rng: Random) -> ToolUse:
    verb, name, symbol = rng.choice((("add", "add_numbers", "+"), ("multiply", "multiply_numbers", "*")))
    a, b = rng.randint(100, 9999), rng.randint(100, 9999)
    result = a + b if verb == "add" else a * b
    question = rng.choice(
        (f"What is {a} {symbol} {b}?", f"Calculate {a} {symbol} {b}.", f"{verb.title()} {a} and {b}.")
    )
    about, answer = f"{verb.title()} two numbers", f"The result is {result}."
    return _use(name, about, question, {"a": a, "b": b}, {"result": result}, answer)


def search(rng: Random) -> ToolUse:
    name = rng.choice(("search", "web_search", "search_web"))
    query = " ".join(rng.sample(WORDS, rng.randint(1, 3)))
    hits = rng.randint(1, 90)
    question = rng.choice(("Search for {0}.", "Look up {0}.", "Search the web for {0}.", "Find {0}."))
    answer = f"I found {hits} results for {query}."
    return _use(name, "Search the web", question.format(query), {"query": query}, {"results": hits}, answer)


def mail(rng: Random) -> ToolUse:
    name, person = rng.choice(("send_email", "send_message")), rng.choice(NAMES)
    text = " ".join(rng.sample(WORDS, rng.randint(1, 4)))
    kind = name.removeprefix("send_")
    question = rng.choice((f"Send this {kind} to {person}: {text}", f"Tell {person} by {kind}: {text}"))
    arguments: Json = {"to": person, "text": text}
    answer = f"The {kind} to {person} was sent."
    return _use(name, f"Sends {kind}s", question, arguments, {"status": "sent"}, answer)


def timer(rng: Random) -> ToolUse:
    minutes = rng.randint(1, 60)
    question = rng.choice(
        ("Set a timer for {0} minutes.", "Wake me in {0} minutes.", "Start a timer of {0} minutes.")
    ).format(minutes)
    answer = f"The timer is set for {minutes} minutes."
    return _use("set_timer", "Set a timer", question, {"minutes": minutes}, {"status": "ok"}, answer)


def light(rng: Random) -> ToolUse:
    room, on = rng.choice(("kitchen", "bedroom", "garden", "office", "hall")), rng.random() < 0.5
    state = "on" if on else "off"
    question = rng.choice((f"Turn {state} the light in the {room}.", f"Switch the {room} light {state}."))
    arguments: Json = {"room": room, "on": on}
    answer = f"The light in the {room} is {state}."
    return _use("set_light", "Turn a light on or off", question, arguments, {"status": "ok"}, answer)


TOOLS: tuple[Callable[[Random], ToolUse], ...] = (weather, weather, clock, adder, search, mail, timer, light)
