"""What a stream of a picture gathers: steps, previews, the latest checkpoint, and the picture."""

from __future__ import annotations

from motet.shared.clock import now_s
from motet.shared.model import ImageParams
from motet.shared.wire.stream import Picture, StreamItem


class NoText:
    """The text of a picture's tokens: there is none (`detokenize.TextStream`)."""

    def push(self, tokens: list[int]) -> str:
        """Nothing."""
        return ""

    def finish(self) -> str:
        """Nothing."""
        return ""


class Drawing:
    """The picture of one stream, as far as it has come. `state`: its latest checkpoint, after `state_step` steps.

    `stepped_s`: when its last denoising step so far came, `drawn_s`: when the picture did; 0 before.
    """

    __slots__ = ("_previews_max", "drawn_s", "picture", "previews", "state", "state_step", "stepped_s")

    def __init__(self, image: ImageParams) -> None:
        self._previews_max = image.previews
        self.picture: Picture | None = None
        self.previews: list[Picture] = []
        self.state, self.state_step = image.state, image.state_step
        self.stepped_s = self.drawn_s = 0.0

    def take(self, item: StreamItem) -> None:
        """Take in an item's picture, preview or checkpoint. Previews beyond those asked for are dropped."""
        if item.state:
            self.state, self.state_step = item.state, item.index + len(item.tokens)
        if item.finish is None:
            self.stepped_s = now_s()
        if item.picture is not None:
            if not item.picture.preview:
                self.picture, self.drawn_s = item.picture, now_s()
            elif len(self.previews) < self._previews_max:
                self.previews.append(item.picture)

    @property
    def bytes(self) -> int:
        """The memory of its pictures."""
        return sum(len(one.data) for one in self.previews) + (len(self.picture.data) if self.picture is not None else 0)
