"""Tool calls for the demo model: functions, questions that need them, and answers made of the results."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from demo_training.facts import COUNTRIES, NAMES, WORDINGS, WORDS

Random = random.Random
Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One function, a question that needs it, the call, its result and the answer made of it."""

    schema: Json
    question: str
    name: str
    arguments: Json
    result: str
    answer: str


def _schema(name: str, description: str, properties: dict[str, str]) -> Json:
    parameters: Json = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    function: Json = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def weather(rng: Random) -> ToolUse:
    name = rng.choice(("get_weather", "get_weather", "weather", "get_current_weather", "fetch_weather"))
    key, city = rng.choice(("city", "location", "city", "place")), rng.choice(COUNTRIES).capital
    degrees, sky = rng.randint(-5, 35), rng.choice(("sunny", "cloudy", "rainy", "windy", "snowy"))
    question = rng.choice(WORDINGS["weather"])
    return ToolUse(
        _schema(name, rng.choice(("Get the weather", "Get the current weather in a city")), {key: "string"}),
        question.format(city),
        name,
        {key: city},
        json.dumps({"temperature": degrees, "condition": sky}),
        f"It is {degrees} degrees and {sky} in {city}.",
    )


def clock(rng: Random) -> ToolUse:
    name, key = rng.choice(("get_time", "current_time", "clock")), rng.choice(("city", "location", "place"))
    city, time = rng.choice(COUNTRIES).capital, f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    question = rng.choice(("What time is it in {0}?", "Tell me the time in {0}.", "How late is it in {0}?"))
    schema = _schema(name, "Get the local time", {key: "string"})
    return ToolUse(
        schema,
        question.format(city),
        name,
        {key: city},
        json.dumps({"time": time}),
        f"It is {time} in {city}.",
    )


def adder(rng: Random) -> ToolUse:
    verb, name, symbol = rng.choice((("add", "add_numbers", "+"), ("multiply", "multiply_numbers", "*")))
    a, b = rng.randint(100, 9999), rng.randint(100, 9999)
    result = a + b if verb == "add" else a * b
    question = rng.choice(
        (f"What is {a} {symbol} {b}?", f"Calculate {a} {symbol} {b}.", f"{verb.title()} {a} and {b}.")
    )
    schema = _schema(name, f"{verb.title()} two numbers", {"a": "integer", "b": "integer"})
    return ToolUse(
        schema, question, name, {"a": a, "b": b}, json.dumps({"result": result}), f"The result is {result}."
    )


def search(rng: Random) -> ToolUse:
    name, query = (
        rng.choice(("search", "web_search", "search_web")),
        " ".join(rng.sample(WORDS, rng.randint(1, 3))),
    )
    hits = rng.randint(1, 90)
    question = rng.choice(("Search for {0}.", "Look up {0}.", "Search the web for {0}.", "Find {0}."))
    schema = _schema(name, "Search the web", {"query": "string"})
    return ToolUse(
        schema,
        question.format(query),
        name,
        {"query": query},
        json.dumps({"results": hits}),
        f"I found {hits} results for {query}.",
    )


def mail(rng: Random) -> ToolUse:
    name, person = rng.choice(("send_email", "send_message")), rng.choice(NAMES)
    text = " ".join(rng.sample(WORDS, rng.randint(1, 4)))
    kind = name.removeprefix("send_")
    question = rng.choice((f"Send this {kind} to {person}: {text}", f"Tell {person} by {kind}: {text}"))
    schema = _schema(name, f"Sends {kind}s", {"to": "string", "text": "string"})
    return ToolUse(
        schema,
        question,
        name,
        {"to": person, "text": text},
        json.dumps({"status": "sent"}),
        f"The {kind} to {person} was sent.",
    )


def timer(rng: Random) -> ToolUse:
    minutes = rng.randint(1, 60)
    question = rng.choice(
        ("Set a timer for {0} minutes.", "Wake me in {0} minutes.", "Start a timer of {0} minutes.")
    )
    schema = _schema("set_timer", "Set a timer", {"minutes": "integer"})
    return ToolUse(
        schema,
        question.format(minutes),
        "set_timer",
        {"minutes": minutes},
        json.dumps({"status": "ok"}),
        f"The timer is set for {minutes} minutes.",
    )


def light(rng: Random) -> ToolUse:
    room, on = rng.choice(("kitchen", "bedroom", "garden", "office", "hall")), rng.random() < 0.5
    state = "on" if on else "off"
    schema = _schema("set_light", "Turn a light on or off", {"room": "string", "on": "boolean"})
    return ToolUse(
        schema,
        rng.choice((f"Turn {state} the light in the {room}.", f"Switch the {room} light {state}.")),
        "set_light",
        {"room": room, "on": on},
        json.dumps({"status": "ok"}),
        f"The light in the {room} is {state}.",
    )


TOOLS: tuple[Callable[[Random], ToolUse], ...] = (weather, weather, clock, adder, search, mail, timer, light)
