"""Large bodies take turns, so that reading many of them at once does not hold up the event loop.

A socket that is ready costs up to a third of a millisecond: 256 KiB are copied and parsed. With 300 of them one round of the
loop took 100 to 190 ms, and an answer needs two or three rounds. The server stops reading a connection whose last part nobody
took, so a part that waits here keeps its connection silent; a slow client waits elsewhere and takes no turn.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import Message, Receive

LARGE_BYTES = 64 << 10  # a smaller part takes no turn
PARTS_PER_ROUND = 16  # 4 MiB in each round of the loop, about 5 ms


class Turns:
    """Who may go on with a large part, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._giving = False

    def applied_to(self, receive: Receive) -> Receive:
        """`receive` of one request, whose large parts wait for their turn."""

        async def in_turn() -> Message:
            message = await receive()
            if len(message.get("body", b"")) >= LARGE_BYTES:
                await self._turn()
            return message

        return in_turn

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if not self._giving:
            self._giving = True
            loop.call_soon(self._give)
        await turn

    def _give(self) -> None:
        given = 0
        while self._waiting and given < PARTS_PER_ROUND:
            turn = self._waiting.popleft()
            if not turn.done():  # its request may be over
                turn.set_result(None)
                given += 1
        self._giving = given > 0
        if self._giving:
            asyncio.get_running_loop().call_soon(self._give)
