"""Stream from several adapters at once with the unmodified OpenAI client.

python examples/clients/openai_stream.py http://127.0.0.1:8000/v1 "hello world" upper-case reverse rot13
"""

from __future__ import annotations

import asyncio
import sys

from openai import AsyncOpenAI


async def ask(client: AsyncOpenAI, model: str, text: str) -> None:
    stream = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=64, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    print(f"{model:>12}  {''.join(pieces)}")


async def main() -> None:
    base_url, text, *models = sys.argv[1:]
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        await asyncio.gather(*(ask(client, model, text) for model in models))


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    asyncio.run(main())
