"""Streams pictures as server-sent events: previews, the finished pictures, and on request a comment for every step.

event: image_generation.partial_image    a preview
event: image_generation.completed        a picture
: step 7/30                              with `x-motet-progress: 1`; of several pictures `: step 7/30 of picture 2`
"""

from __future__ import annotations

import base64
from typing import Any

from motet.services.gateway.edge.sse import EventStream
from motet.services.gateway.openai import images
from motet.services.gateway.openai.schemas import ImageEvent
from motet.services.gateway.owner.encoding import encoded_at_once
from motet.services.gateway.owner.made_by import MadeBy
from motet.services.gateway.owner.stream import Signal, Stream
from motet.shared.clock import unix_ms
from motet.shared.wire.stream import Picture


class ImageEvents(EventStream):
    """The pictures of one request."""

    _error_begins = b"event: error\ndata: "

    def __init__(self, prepared: images.PreparedImages, streams: list[Stream], signal: Signal, made_by: MadeBy) -> None:
        super().__init__(streams, signal, made_by)
        self._prepared = prepared
        self._steps = [0] * len(streams)  # that comments have told
        self._previews = [0] * len(streams)  # that events have shown

    def _news(self, i: int, stream: Stream, parts: list[bytes]) -> None:
        """The previews of a picture that no event has shown, and its steps so far."""
        stream.take()  # what it tells is in its fields
        for picture in stream.previews[self._previews[i] :]:
            parts.append(self._event(i, "partial_image", picture, partial_image_index=self._previews[i]))
            self._previews[i] += 1
        steps = min(len(stream.tokens), self._prepared.image.steps_run)
        if self._prepared.progress and steps > self._steps[i]:
            self._steps[i] = steps
            which = f" of picture {i}" if len(self._streams) > 1 else ""
            parts.append(f": step {steps}/{self._prepared.image.steps_run}{which}\n\n".encode())

    def _ended(self, i: int, stream: Stream, parts: list[bytes]) -> None:
        picture = images.finished(stream)
        parts.append(self._event(i, "completed", picture, seed=picture.seed, usage=self._prepared.usage(1)))

    def _event(self, i: int, what: str, picture: Picture, **more: Any) -> bytes:
        kind: Any = f"{self._prepared.request.event}.{what}"
        body = ImageEvent(
            type=kind,
            created_at=unix_ms() // 1000,
            index=i,
            b64_json=base64.b64encode(picture.data).decode(),
            output_format=picture.format,
            size=f"{picture.width}x{picture.height}",
            **more,
        )
        return f"event: {kind}\ndata: ".encode() + encoded_at_once(body) + b"\n\n"
