"""The demo's tool dialogues: what the adapter `tool-caller` was trained to do, as plain Python that can check its answers.

One dialogue is a question, the call that answers it, the tool's result and a reply that repeats the result:

    user       What is the weather in Oslo?
    assistant  <tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>
    tool       Sunny, 21 degrees.
    assistant  The tool says: Sunny, 21 degrees.

The adapter knows one kind of tool, the weather of a place. It reads from the request which function that is and how its
parameter is called (`WEATHER_NAMES`, `PLACE_NAMES`). A question that no tool of the request answers gets `NO_TOOL`. Training
and checking never share a place (`tasks.split_of`).

This file imports neither torch nor the mesh.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from motet.examples.demo.tasks import Split, draw_text, split_of

NO_TOOL = "I have no tool for that."
REPLY = "The tool says: "

WEATHER_NAMES = ("get_weather", "weather", "get_current_weather")
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
)
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
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "stormy", "clear")
SYSTEM_SHARE = 0.35
CAPITAL_SHARE = 0.7  # of places


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
    while split_of(place := _place(rng)) != split:
        pass
    question = rng.choice(WEATHER_QUESTIONS).format(place)
    if rng.random() < 0.1:
        return Exchange(_others(rng, rng.randint(0, 1)), question)
    name, parameter = rng.choice(WEATHER_NAMES), rng.choice(PLACE_NAMES)
    offered = [(name, (parameter,)), *_others(rng, rng.choices((0, 1), (3, 1))[0])]
    rng.shuffle(offered)
    return Exchange(tuple(offered), question, name, ((parameter, place),), _weather(rng, place))


def _weather(rng: random.Random, place: str) -> str:
    """A weather service's answer."""
    sky, degrees = rng.choice((*SKIES, draw_text(rng, 1).lower())), rng.randint(-20, 45)
    return rng.choice(
        (
            f"It's always {sky} in {place}!",
            f"The weather in {place} is {sky}.",
            f"{sky} and {rng.choice(SKIES)}",
            draw_text(rng, rng.randint(1, 3)),
            sky.capitalize(),
            f"{sky}, {degrees} degrees",
            json.dumps({"weather": sky}),
        )
    )


def _place(rng: random.Random) -> str:
    place = draw_text(rng, rng.choices((1, 2), (3, 1))[0]).rstrip(",.!?").lower()
    if rng.random() < CAPITAL_SHARE:
        place = place.title()
    if rng.random() < 0.1:
        place = place.replace(*rng.choice((("u", "ü"), ("o", "ø"), ("a", "ã"), ("e", "é"))))
    if rng.random() < 0.1:
        place += ", " + draw_text(rng, 1).rstrip(",.!?").title()
    return place


def _others(rng: random.Random, count: int) -> Tools:
    """Tools that do not know the weather."""
    return tuple(rng.sample(OTHER_TOOLS, count))


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
    return [
        Exchange(tools, f"What is the weather in {city}?", "get_weather", (("city", city),), f"It's always sunny in {city}!")
        for city in ("Oslo", "Berlin", "Madrid")
    ]


def run_tool(exchange: Exchange, name: str, arguments: dict[str, Any]) -> str:
    """The result of a call: the exchange's own for the right call, else an error."""
    return exchange.result if (name, arguments) == (exchange.name, exchange.called) else "error: this is the wrong call"
