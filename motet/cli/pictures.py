"""Pictures on a terminal: as they are where it speaks kitty's graphics protocol, else as half blocks of colour.

    kitty          ESC _ G ... ; the PNG in base64, in pieces of 4 KiB ESC \\
    half blocks    one character for two pixels, one above the other
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping

from PIL import Image

PIECE_BYTES = 4096
COLUMNS_MAX = 64  # of half blocks
_HALF = "▀"
_SPEAKS_KITTY = frozenset({"ghostty", "WezTerm", "kitty"})


def speaks_kitty(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the terminal shows pictures by kitty's protocol. Within tmux or screen it does not."""
    if "TMUX" in environ or environ.get("TERM", "").startswith(("tmux", "screen")):
        return False
    named = environ.get("TERM_PROGRAM", "") in _SPEAKS_KITTY or "KITTY_WINDOW_ID" in environ
    return named or environ.get("TERM", "") in ("xterm-kitty", "xterm-ghostty")


def as_kitty(data: bytes, rows: int = 16) -> str:
    """A picture's file as kitty's protocol sends it, shown in so many rows of text."""
    file = io.BytesIO()
    with Image.open(io.BytesIO(data)) as picture:
        picture.convert("RGB").save(file, "PNG")
    text = base64.b64encode(file.getvalue()).decode()
    pieces = [text[at : at + PIECE_BYTES] for at in range(0, len(text), PIECE_BYTES)]
    sent = []
    for i, piece in enumerate(pieces):
        first = f"f=100,a=T,r={rows}," if i == 0 else ""
        sent.append(f"\033_G{first}m={int(i < len(pieces) - 1)};{piece}\033\\")
    return "".join(sent) + "\n"


def as_half_blocks(data: bytes, columns: int) -> str:
    """A picture's file as lines of coloured half blocks, at most `columns` wide."""
    with Image.open(io.BytesIO(data)) as opened:
        picture = opened.convert("RGB")
    width = max(1, min(columns, COLUMNS_MAX))
    height = max(2, round(picture.height * width / picture.width / 2) * 2)
    larger = width > picture.width
    picture = picture.resize((width, height), Image.Resampling.NEAREST if larger else Image.Resampling.LANCZOS)
    pixels = picture.load()
    assert pixels is not None, "a picture that was just made is in memory"
    lines = []
    for y in range(0, height, 2):
        cells = []
        for x in range(width):
            upper, lower = pixels[x, y], pixels[x, y + 1]
            assert isinstance(upper, tuple) and isinstance(lower, tuple), "pixels of RGB"
            cells.append(f"\033[38;2;{_colour(upper)};48;2;{_colour(lower)}m{_HALF}")
        lines.append("".join(cells) + "\033[0m")
    return "\n".join(lines) + "\n"


def _colour(pixel: tuple[float, ...]) -> str:
    return ";".join(str(int(value)) for value in pixel[:3])
