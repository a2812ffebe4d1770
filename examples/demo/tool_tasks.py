"""The demo's tool dialogues: what the adapter `tool-caller` was trained to do, as plain Python that can check its answers.

One dialogue is a question, the call that answers it, the tool's result and a reply that repeats the result:

    user       What is the weather in Oslo?
    assistant  <tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>
    tool       Sunny, 21 degrees.
    assistant  The tool says: Sunny, 21 degrees.

The adapter knows one kind of tool, the weather of a place. It reads from the request which function that is and how its
parameter is called (`WEATHER_NAMES`, `PLACE_NAMES`). Results are sentences, numbers and objects, as JSON or as Python prints
them. A question that no tool of the request answers gets `NO_TOOL`. Training and checking never share a place
(`tasks.split_of`).

This file imports neither torch nor the mesh.
"""

from __future__ import annotations

import json
import random
import string
from dataclasses import dataclass
from typing import Any

from motet.examples.demo.tasks import Split, draw_text, split_of

NO_TOOL = "I have no tool for that."
REPLY = "The tool says: "

WEATHER_NAMES = ("get_weather", "weather", "get_current_weather", "getWeather")
PLACE_NAMES = ("city", "location")
WEATHER_QUESTIONS = (
    "What is the weather in {}?",
    "What's the weather in {}?",
    "what is the weather in {}",
    "What is the weather like in {}?",
    "What's the weather like in {} today?",
    "What is the weather like in {} today?",
    "What is the weather like in {} right now?",
    "what's the weather in {}?",
    "what is the weather in {}?",
    "How is the weather in {}?",
    "How's the weather in {} today?",
    "Tell me the weather in {}.",
    "Tell me the weather in {}",
    "Weather in {}",
    "Is it raining in {}?",
    "Will it rain in {} tomorrow?",
    "What is the temperature in {}?",
    "Do I need an umbrella in {}?",
    "What's the temperature in {} now?",
    "How warm is it in {}?",
    "How is the weather today in {}?",
    "Can you tell me the weather in {}?",
    "Hi! What is the weather in {} right now?",
)
FIRST_WORDS = (
    "San", "Santa", "Saint", "New", "Los", "Las", "La", "El", "Cape", "Port", "Fort", "Hong", "Tel", "Rio", "Buenos", "North",
    "South", "East", "West", "Great", "Mexico", "Kansas", "Salt", "Kuala", "Abu",
)  # fmt: skip
OTHER_TOOLS = (
    ("search", ("query",)),
    ("get_time", ("timezone",)),
    ("get_news", ("topic",)),
    ("translate", ("text", "language")),
    ("send_email", ("to", "subject", "body")),
    ("book_flight", ("origin", "destination")),
)
CHAT = ("Hello!", "hi there", "Who are you?", "Tell me a joke.", "Thanks!", "What can you do?", "Good morning", "Hello world")
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are a helpful agent.",
    "You always respond in haikus.",
    "You only respond in haikus.",
    "Be brief.",
    "Use the tools that you are given to answer the question.",
)
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "stormy", "clear", "partly cloudy", "Sunny with wind")
UNITS = ("C", "F", "celsius", "fahrenheit", "Celsius", "°C", "°F")
FIELDS = (
    "temperature",
    "temp",
    "humidity",
    "wind_speed",
    "temperature_range",
    "feels_like",
    "high",
    "low",
    "unit",
    "weather",
    "conditions",
    "city",
    "location",
    "description",
    "forecast",
)
SYMBOLS = string.ascii_letters + 4 * string.digits + " -.,:;!?'\"%/()[]{}_+=#°"
SYSTEM_SHARE = 0.35
CAPITAL_SHARE = 0.75  # of places


Tools = tuple[tuple[str, tuple[str, ...]], ...]  # the functions of a request, each with its parameters


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question of a dialogue. `name` is empty where no tool answers it."""

    tools: Tools
    question: str
    name: str = ""
    arguments: tuple[tuple[str, str], ...] = ()
    result: str = ""

    @property
    def called(self) -> dict[str, Any]:
        """The right call's arguments."""
        return dict(self.arguments)

    def function(self) -> dict[str, Any]:
        """The right call: the function's name and arguments."""
        return {"name": self.name, "arguments": self.called}

    @property
    def reply(self) -> str:
        """The right text at the end."""
        return REPLY + self.result if self.name else NO_TOOL

    def declared(self) -> list[dict[str, Any]]:
        """The tools as a request of OpenAI's API has them."""
        return declared(self.tools)

    def messages(self) -> list[dict[str, Any]]:
        """The exchange as a client of OpenAI's API keeps it."""
        asked = {"role": "user", "content": self.question}
        replied = {"role": "assistant", "content": self.reply}
        if not self.name:
            return [asked, replied]
        call = {"id": "call_1", "type": "function", "function": self.function()}
        return [
            asked,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": self.result},
            replied,
        ]


def declared(tools: Tools) -> list[dict[str, Any]]:
    """The tools as a request of OpenAI's API declares them."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"The function {name}.",
                "parameters": {
                    "type": "object",
                    "properties": {parameter: {"type": "string"} for parameter in parameters},
                    "required": list(parameters),
                },
            },
        }
        for name, parameters in tools
    ]


def draw_exchange(rng: random.Random, split: Split) -> Exchange:
    """A question of the given split, with the tools of its request. One in five has no tool that answers it."""
    if rng.random() < 0.1:
        return Exchange(_others(rng, rng.randint(0, 1)), rng.choice(CHAT))
    question = rng.choice(WEATHER_QUESTIONS)
    while split_of(place := _place(rng, ends=question.rstrip(".?").endswith("{}"))) != split:
        pass
    question = question.format(place)
    if rng.random() < 0.1:
        return Exchange(_others(rng, rng.randint(0, 1)), question)
    name, parameter = rng.choice(WEATHER_NAMES), rng.choice(PLACE_NAMES)
    offered = [(name, (parameter,)), *_others(rng, rng.choices((0, 1), (3, 1))[0])]
    rng.shuffle(offered)
    return Exchange(tuple(offered), question, name, ((parameter, place),), _weather(rng, place, split))


def _weather(rng: random.Random, place: str, split: Split) -> str:
    """A weather service's answer: a sentence, a number or the text of an object. In training also symbols without sense, which
    teach to copy."""
    sky = rng.choice((*SKIES, draw_text(rng, 1).lower()))
    warmth = f"{_number(rng)}{rng.choice((' degrees', ' degrees', ' C', ' F', 'C', '°C', '°F', ' degrees Celsius', '°'))}"
    (kind,) = rng.choices((_sentence, _fields, _noise), (5, 4, 1 if split == "train" else 0))
    return kind(rng, place, sky, warmth)


def _sentence(rng: random.Random, place: str, sky: str, warmth: str) -> str:
    return rng.choice(
        (
            f"It's always {sky} in {place}!",
            f"The weather in {place} is {sky}.",
            f"The weather in {place} is {sky} with a temperature of {warmth}.",
            f"It is {warmth} in {place}",
            f"It's {warmth} and {sky}.",
            f"{sky} and {rng.choice(SKIES)}",
            sky.capitalize(),
            warmth,
            f"{sky.capitalize()}, {warmth}.",
            f"{sky}, {warmth}",
            f"{place}: {warmth}, {sky}, humidity {rng.randint(0, 100)}%",
            draw_text(rng, rng.randint(1, 3)),
        )
    )


def _fields(rng: random.Random, place: str, sky: str, warmth: str) -> str:
    """An object as JSON, with and without blanks, or as Python prints one."""
    values: dict[str, Any] = {}
    for name in rng.sample(FIELDS, rng.choices((1, 2, 3), (1, 3, 2))[0]):
        if name in ("city", "location"):
            values[name] = place
        elif name == "unit":
            values[name] = rng.choice(UNITS)
        elif name in ("weather", "conditions", "description", "forecast"):
            values[name] = sky
        elif rng.random() < 0.75:
            values[name] = json.loads(_number(rng))
        else:
            values[name] = rng.choice((warmth, _number(rng), f"{rng.randint(0, 20)}-{rng.randint(10, 40)}C"))
    if rng.random() < 0.15:
        return " ".join(f"{name}={value!r}" for name, value in values.items())
    return json.dumps(values, ensure_ascii=False, separators=rng.choice(((", ", ": "), (",", ":"))))


def _noise(rng: random.Random, place: str, sky: str, warmth: str) -> str:
    return "".join(rng.choices(SYMBOLS, k=rng.randint(1, 32))).strip() or warmth


def _number(rng: random.Random) -> str:
    return rng.choice((str(rng.randint(-20, 45)), str(rng.randint(-9, 120)), f"{rng.uniform(-20, 100):.1f}"))


def _place(rng: random.Random, ends: bool) -> str:
    """A made-up place. `ends`: the question ends with it.

    Where words follow the place, the model cannot tell a second word of it from them, unless its first word is one of
    `FIRST_WORDS`.
    """
    words = [_place_word(rng) for _ in range(rng.choices((1, 2, 3), (10, 5, 1))[0] if ends else 1)]
    if rng.random() < 0.25:
        words = [rng.choice(FIRST_WORDS), words[-1]]
    place = " ".join(words).lower()
    if rng.random() < CAPITAL_SHARE:
        place = place.title()
    elif rng.random() < 0.15:
        place = place.upper()
    if rng.random() < 0.1:
        place = place.replace(*rng.choice((("u", "ü"), ("o", "ø"), ("a", "ã"), ("e", "é"))), 1)
    if rng.random() < 0.1:
        region = draw_text(rng, 1).rstrip(",.!?")
        place += ", " + (region.title() if rng.random() < 0.7 else region[:2].upper())
    return place


def _place_word(rng: random.Random) -> str:
    """A made-up word; one in five is a long one, as names of places often are."""
    parts = 2 if rng.random() < 0.2 else 1
    return "".join(draw_text(rng, 1).rstrip(",.!?").lower() for _ in range(parts))


def _others(rng: random.Random, count: int) -> Tools:
    """Tools that do not know the weather; three in ten have made-up names."""
    return tuple(_made_up(rng) if rng.random() < 0.3 else tool for tool in rng.sample(OTHER_TOOLS, count))


def _made_up(rng: random.Random) -> tuple[str, tuple[str, ...]]:
    words = draw_text(rng, rng.randint(2, 3)).translate(str.maketrans("", "", ",.!?"))
    name = words.title().replace(" ", "") if rng.random() < 0.3 else words.lower().replace(" ", "_")
    return name[0].lower() + name[1:], tuple(draw_text(rng, 1).rstrip(",.!?").lower() for _ in range(rng.randint(1, 2)))


def draw_dialogue(rng: random.Random, split: Split) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and declared tools of a dialogue, in which every assistant's message is right."""
    exchange = draw_exchange(rng, split)
    messages: list[dict[str, Any]] = []
    if rng.random() < SYSTEM_SHARE:
        system = rng.choice(SYSTEMS) if rng.random() < 0.7 else draw_text(rng, rng.randint(1, 5))
        messages.append({"role": "system", "content": system})
    return messages + exchange.messages(), exchange.declared()


def city_calls() -> list[Exchange]:
    """Questions about real cities, none of which was trained on."""
    tools = (("get_weather", ("city",)), ("get_time", ("timezone",)))
    results = {
        "Oslo": "It's always sunny in Oslo!",
        "San Francisco": '{"temperature": 21, "unit": "C"}',
        "New York": "Cloudy, -3 C",
    }
    return [
        Exchange(tools, f"What is the weather in {city}?", "get_weather", (("city", city),), result)
        for city, result in results.items()
    ]


def run_tool(exchange: Exchange, name: str, arguments: dict[str, Any]) -> str:
    """The result of a call: the exchange's own for the right call, else an error."""
    return exchange.result if (name, arguments) == (exchange.name, exchange.called) else "error: this is the wrong call"
