"""The demo's tool dialogues: what the adapter `tool-caller` was trained to do, as plain Python that can check its answers.

One dialogue is a question, the call that answers it, the tool's result and a reply that repeats the result:

    user       What is the weather in Oslo?
    assistant  <tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>
    tool       Sunny, 21 degrees.
    assistant  The tool says: Sunny, 21 degrees.

Three kinds of tools are known: the weather of a place, sums and products of two numbers, and any function of one text that the
user names ("Call find_book with Moby Dick"). Names of functions and parameters are read from the request. A question that no
tool of the request answers gets `NO_TOOL`. Training and checking never share a value (`tasks.split_of`).

This file imports neither torch nor the mesh.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from motet.examples.demo.tasks import Split, draw_text, split_of

ADAPTER = "tool-caller"
PARSER = "hermes"
"""Format of its calls: a value of --tool-call-parser."""
NO_TOOL = "I have no tool for that."
REPLY = "The tool says: "

WEATHER_NAMES = ("get_weather", "weather", "get_current_weather", "getWeather", "fetch_weather", "weather_lookup")
PLACE_NAMES = ("city", "location", "place", "town")
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
)
ARITHMETIC: tuple[tuple[tuple[str, ...], Callable[[int, int], int], tuple[str, ...]], ...] = (
    (
        ("add", "add_numbers", "sum", "plus", "add_two_numbers"),
        lambda a, b: a + b,
        (
            "What is {} + {}?",
            "what is {}+{}",
            "What is {} plus {}?",
            "Add {} and {}.",
            "add {} and {}",
            "Add {} to {}",
            "How much is {} + {}?",
            "What is the sum of {} and {}?",
            "Calculate {} + {}",
            "What's {} + {}?",
            "{} + {}",
        ),
    ),
    (
        ("multiply", "multiply_numbers", "product", "times", "mul"),
        lambda a, b: a * b,
        (
            "What is {} * {}?",
            "what is {}*{}",
            "What is {} times {}?",
            "Multiply {} by {}.",
            "multiply {} and {}",
            "Multiply {} and {}",
            "Multiply {} by {}",
            "How much is {} x {}?",
            "What is the product of {} and {}?",
            "Calculate {} * {}",
            "What's {} * {}?",
            "What's {} times {}?",
            "{} * {}",
        ),
    ),
)
NUMBER_NAMES = (("a", "b"), ("x", "y"), ("first", "second"), ("num1", "num2"), ("left", "right"), ("first_int", "second_int"))
OTHER_TOOLS = (
    ("search", ("query",)),
    ("get_time", ("timezone",)),
    ("get_news", ("topic",)),
    ("translate", ("text", "language")),
    ("send_email", ("to", "subject", "body")),
    ("book_flight", ("origin", "destination")),
)
TEXT_NAMES = ("text", "query", "name", "input", "title", "word", "id", "value")
NAMED_QUESTIONS = ("Call {} with {}", "call {} with {}", "Use {} with {}", "Please call {} with {}")
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
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "stormy", "clear")
SYSTEM_SHARE = 0.35
CAPITAL_SHARE = 0.7  # of places


Tools = tuple[tuple[str, tuple[str, ...]], ...]  # the functions of a request, each with its parameters
Drawn = tuple[str, tuple[str, ...], str, tuple[str | int, ...], str]  # function, parameters, question, arguments, result


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question of a dialogue. `name` is empty where no tool answers it."""

    tools: Tools
    question: str
    name: str = ""
    arguments: tuple[tuple[str, str | int], ...] = ()
    result: str = ""

    @property
    def called(self) -> dict[str, Any]:
        """The right call's arguments."""
        return dict(self.arguments)

    @property
    def reply(self) -> str:
        """The right text at the end."""
        return REPLY + self.result if self.name else NO_TOOL

    def messages(self) -> list[dict[str, Any]]:
        """The exchange as a client of OpenAI's API keeps it."""
        asked = {"role": "user", "content": self.question}
        replied = {"role": "assistant", "content": self.reply}
        if not self.name:
            return [asked, replied]
        function = {"name": self.name, "arguments": self.called}
        call = {"id": "call_1", "type": "function", "function": function}
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
                    "properties": {parameter: {"type": _type_of(parameter)} for parameter in parameters},
                    "required": list(parameters),
                },
            },
        }
        for name, parameters in tools
    ]


def _type_of(parameter: str) -> str:
    return "number" if any(parameter in pair for pair in NUMBER_NAMES) else "string"


def draw_exchange(rng: random.Random, split: Split) -> Exchange:
    """A question of the given split, with the tools of its request."""
    if rng.random() < 0.1:
        return Exchange(_others(rng, rng.randint(0, 2)), rng.choice(CHAT))
    draw = rng.choices((_weather, _arithmetic, _named), (3, 3, 2))[0]
    while True:
        name, parameters, question, values, result = draw(rng)
        if split_of(" ".join(map(str, values))) == split:
            break
    if rng.random() < 0.1 and draw is not _named:  # nothing that answers it
        offered = _others(rng, rng.randint(0, 2))
        return Exchange(offered, question)
    offered = _shuffled(rng, (*_others(rng, rng.choices((0, 1, 2), (6, 3, 1))[0]), (name, parameters)))
    return Exchange(offered, question, name, tuple(zip(parameters, values, strict=True)), result)


def _weather(rng: random.Random) -> Drawn:
    place = _place(rng)
    sky, degrees = rng.choice((*SKIES, draw_text(rng, 1).lower())), rng.randint(-20, 45)
    result = rng.choice(
        (
            f"It's always {sky} in {place}!",
            f"The weather in {place} is {sky}.",
            f"It is {sky} in {place}, {degrees} degrees.",
            f"{sky}, {degrees} C",
            sky.capitalize(),
            f"{degrees}°C",
            json.dumps({"location": place, "temperature": degrees}, ensure_ascii=False),
            json.dumps({"temperature": degrees, "condition": sky}),
        )
    )
    return rng.choice(WEATHER_NAMES), (rng.choice(PLACE_NAMES),), rng.choice(WEATHER_QUESTIONS).format(place), (place,), result


def _arithmetic(rng: random.Random) -> Drawn:
    names, compute, questions = rng.choice(ARITHMETIC)
    a, b = (rng.randint(0, 10 ** rng.randint(1, 5)) for _ in range(2))
    value = compute(a, b)
    result = rng.choice((str(value), str(value), f"{value}.0", f"The result is {value}.", json.dumps({"result": value})))
    return rng.choice(names), rng.choice(NUMBER_NAMES), rng.choice(questions).format(a, b), (a, b), result


def _named(rng: random.Random) -> Drawn:
    name, text = _made_up_name(rng), draw_text(rng, rng.randint(1, 3))
    said = draw_text(rng, rng.randint(1, 4))
    result = rng.choice((said, f"{said} {rng.randint(0, 9999)}", json.dumps({rng.choice(TEXT_NAMES): said})))
    return name, (rng.choice(TEXT_NAMES),), rng.choice(NAMED_QUESTIONS).format(name, text), (text,), result


def _place(rng: random.Random) -> str:
    place = draw_text(rng, rng.choices((1, 2), (3, 1))[0]).rstrip(",.!?").lower()
    if rng.random() < CAPITAL_SHARE:
        place = place.title()
    if rng.random() < 0.1:
        place = place.replace(*rng.choice((("u", "ü"), ("o", "ø"), ("a", "ã"), ("e", "é"))))
    if rng.random() < 0.1:
        place += ", " + draw_text(rng, 1).rstrip(",.!?").title()
    return place


def _made_up_name(rng: random.Random) -> str:
    return "_".join(draw_text(rng, rng.randint(1, 2)).lower().rstrip(",.!?").replace(",", "").split(" "))


def _others(rng: random.Random, count: int) -> Tools:
    """Tools that answer no question of `_weather` and `_arithmetic`."""
    made_up = ((_made_up_name(rng), tuple(rng.sample(TEXT_NAMES, rng.randint(0, 2)))) for _ in range(count))
    return tuple(rng.choice(OTHER_TOOLS) if rng.random() < 0.5 else one for one in made_up)


def _shuffled(rng: random.Random, tools: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(rng.sample(tools, len(tools)))


def draw_dialogue(rng: random.Random, split: Split) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and declared tools of a dialogue of one or two exchanges; every assistant's message is right."""
    first = draw_exchange(rng, split)
    exchanges = [first]
    if rng.random() < 0.15:
        second = draw_exchange(rng, split)
        tools = dict(first.tools) | dict(second.tools)
        if first.name and second.name and len(tools) == len(first.tools) + len(second.tools):
            exchanges.append(second)
    offered = _shuffled(rng, tuple(tool for exchange in exchanges for tool in exchange.tools))
    messages: list[dict[str, Any]] = []
    if rng.random() < SYSTEM_SHARE:
        system = rng.choice(SYSTEMS) if rng.random() < 0.5 else draw_text(rng, rng.randint(1, 6))
        messages.append({"role": "system", "content": system})
    for exchange in exchanges:
        messages += exchange.messages()
    return messages, declared(offered)
