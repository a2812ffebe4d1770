"""Clients of the end-to-end tests."""

from __future__ import annotations

from typing import Any

from motet.cli.client import ApiError, Client
from motet.examples.demo.tasks import TASKS
from tests.support import eventually

PROMPT = TASKS[0].prompt  # all tasks are asked in the same way


async def answer(client: Client, model: str, text: str) -> str:
    """The answer to a chat, streamed."""
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT(text)}], "temperature": 0, "max_tokens": 96}
    events = [event async for event in client.events("/v1/chat/completions", body)]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"]).strip()


async def answered(client: Client, model: str, text: str, *, within_s: float = 30.0) -> str:
    """`answer`, repeated while the stack recovers from a fault."""

    async def ask() -> str | None:
        try:
            return await answer(client, model, text)
        except ApiError as error:
            assert error.status in (0, 404, 429, 500, 503, 504), error
            return None

    found: str = await eventually(ask, within_s=within_s, every_s=0.1)
    return found


def long_request(seed: int) -> dict[str, Any]:
    """A completion of exactly 300 sampled tokens, the same for the same seed."""
    return {
        "model": TASKS[seed % len(TASKS)].adapter,
        "prompt": PROMPT("Gdud flwi"),
        "max_tokens": 300,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": seed,
        "stream_options": {"include_usage": True},
    }
