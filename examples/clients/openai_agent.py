"""An agent that calls tools, with the unmodified OpenAI client: ask, run what the model calls, send the results back.

    make serve      # or: motet up --demo
    python examples/clients/openai_agent.py http://127.0.0.1:8000/v1 "What is the weather in Oslo?"

The demo's adapter `tool-caller` was trained on questions about the weather of a place.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from openai import OpenAI

MODEL = "tool-caller"
ROUNDS = 4  # of calls before the agent gives up


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"It's always sunny in {city}!"


def get_time(timezone: str) -> str:
    """The time in a time zone."""
    return f"It is noon in {timezone}."


FUNCTIONS: dict[str, Callable[..., str]] = {"get_weather": get_weather, "get_time": get_time}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": function.__doc__,
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": "string"}},
                "required": [parameter],
            },
        },
    }
    for name, function, parameter in (("get_weather", get_weather, "city"), ("get_time", get_time, "timezone"))
]


def answer(client: OpenAI, question: str, *, say: Callable[[str], None] = print) -> str:
    """The agent's answer to a question. `say` is told of each call."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(ROUNDS):
        response = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=200)
        message = response.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            assert call.type == "function"
            arguments = json.loads(call.function.arguments)
            try:
                result = FUNCTIONS[call.function.name](**arguments)
            except (KeyError, TypeError) as error:  # the model may call what is not there: it is told
                result = f"error: {error}"
            say(f"  {call.function.name}({arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "no answer"


def main() -> None:
    base_url, *questions = sys.argv[1:]
    with OpenAI(base_url=base_url, api_key="none") as client:
        for question in questions:
            print(question)
            print(answer(client, question))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main()
