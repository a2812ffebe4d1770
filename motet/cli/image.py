"""`motet image`: draw a picture, watch it come, and see it in the terminal or save it."""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
import sys
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any, get_args

import click
import orjson

from motet.cli.client import Client
from motet.cli.pictures import as_half_blocks, as_kitty, speaks_kitty
from motet.cli.progress import bar
from motet.cli.terminal import connection
from motet.shared.model import Sampler

FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
SAMPLERS = get_args(Sampler)
_STEP = re.compile(r"step (\d+)/(\d+)(?: of picture (\d+))?")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@connection
@click.option("--adapter", "adapters", multiple=True, metavar="NAME[=WEIGHT]", help="An adapter; may be given several times.")
@click.option("--model", default="", help="The base model, an adapter, or base:adapter.  [default: the base model]")
@click.option("--negative", "negative_prompt", default="", help="What the picture shall not show.")
@click.option("--size", default="", metavar="WxH", help="Size in pixels.  [default: the base model's]")
@click.option("--steps", "num_inference_steps", type=click.IntRange(1), help="Denoising steps.")
@click.option(
    "--guidance", "guidance_scale", type=click.FloatRange(0), help="How closely the prompt is followed; 1: not at all."
)
@click.option("--sampler", type=click.Choice(SAMPLERS), help="Sampler.")
@click.option("--seed", type=click.IntRange(0), help="Seed that makes the picture repeatable.")
@click.option("-n", "n", default=1, show_default=True, type=click.IntRange(1, 10), help="Number of pictures.")
@click.option("--init", type=_FILE, help="A picture to begin with.")
@click.option("--mask", type=_FILE, help="For --init: a picture whose transparent pixels are drawn anew.")
@click.option("--strength", type=click.FloatRange(0, 1, min_open=True), help="For --init: how much of it changes.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File to write: .png, .jpg or .webp.")
@click.argument("prompt")
def image(prompt: str, url: str, out: Path | None, init: Path | None, mask: Path | None, **settings: Any) -> None:
    """Draw PROMPT.

    \b
      motet image "a red circle on sky"
      motet image "a red circle on sky" --adapter invert=0.8 --adapter frame --seed 3 --out a.png
      motet image "a blue square on sand" --init a.png --strength 0.6
    """
    body = request_of(prompt, settings, out)
    if mask is not None and init is None:
        raise click.UsageError("--mask: it belongs to a picture; give that with --init")
    if settings["strength"] is not None and init is None:
        raise click.UsageError("--strength: it belongs to a picture; give that with --init")
    if out is None and not sys.stdout.isatty():
        raise click.UsageError("--out: without a terminal there is nowhere to show the picture")
    files = {name: path for name, path in (("image", init), ("mask", mask)) if path is not None}
    pictures = asyncio.run(draw(url, body, files))
    for number, (data, seed) in enumerate(pictures, 1):
        if out is not None:
            path = out if len(pictures) == 1 else out.with_stem(f"{out.stem}-{number}")
            try:
                path.write_bytes(data)
            except OSError as error:
                raise click.ClickException(f"--out: {path}: {error.strerror}") from None
            click.echo(f"{path}, seed {seed}", err=True)
        if sys.stdout.isatty():
            sys.stdout.write(as_kitty(data) if speaks_kitty() else as_half_blocks(data, shutil.get_terminal_size().columns))
            sys.stdout.flush()
        if out is None:
            click.echo(f"seed {seed}", err=True)


def request_of(prompt: str, settings: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """The body of a request from the command's options. Raises UsageError naming the option."""
    adapters = []
    for text in settings["adapters"]:
        name, given, weight = text.rpartition("=")
        try:
            adapters.append({"name": name, "weight": _finite(weight)} if given else {"name": text})
        except ValueError:
            raise click.UsageError(f"--adapter: {text!r}: expected NAME or NAME=WEIGHT, such as invert=0.8") from None
    for option, name in (("--guidance", "guidance_scale"), ("--strength", "strength")):
        if not isfinite(settings.get(name) or 0.0):
            raise click.UsageError(f"{option}: {settings[name]} is no number that can be sent")
    body = {name: value for name, value in settings.items() if value not in (None, "", ()) and name != "adapters"}
    if adapters:
        body["adapters"] = adapters
    if out is not None:
        if out.suffix.lower() not in FORMATS:
            raise click.UsageError(f"--out: {out}: expected a file that ends in {', '.join(FORMATS)}")
        body["output_format"] = FORMATS[out.suffix.lower()]
    return body | {"prompt": prompt, "stream": True}


async def draw(url: str, body: dict[str, Any], files: dict[str, Path]) -> list[tuple[bytes, int]]:
    """(file, seed) of each picture, in order; a bar shows the steps on the way. Raises ApiError."""
    headers, drawn = {"x-motet-progress": "1"}, dict[int, tuple[bytes, int]]()
    async with Client(url) as client:
        path, sent = "/v1/images/generations", dict[str, Any](json=body)
        if files:
            path, sent = "/v1/images/edits", {"data": _form(body), "files": _opened(files)}
        with bar("drawing", 1.0) as show:
            told = _Steps(body.get("n", 1), show)
            async for news in client.news(path, headers=headers, **sent):
                if isinstance(news, str):
                    told.hear(news)
                elif news["type"].endswith(".completed"):
                    drawn[news["index"]] = (base64.b64decode(news["b64_json"]), news["seed"])
    return [drawn[index] for index in sorted(drawn)]


def _finite(text: str) -> float:
    """The number, which JSON can carry. Raises ValueError."""
    if not isfinite(value := float(text)):
        raise ValueError(f"{text} is no number of JSON")
    return value


class _Steps:
    """Turns the comments of a stream into the share of all steps that is done."""

    def __init__(self, pictures: int, show: Callable[[float], None]) -> None:
        self._done, self._show = [0.0] * pictures, show

    def hear(self, comment: str) -> None:
        found = _STEP.fullmatch(comment)
        if found is not None and (index := int(found[3] or 0)) < len(self._done):
            self._done[index] = int(found[1]) / max(1, int(found[2]))
            self._show(sum(self._done) / len(self._done))


def _form(body: dict[str, Any]) -> dict[str, str]:
    """The fields of a form, as texts."""
    return {name: value if isinstance(value, str) else orjson.dumps(value).decode() for name, value in body.items()}


def _opened(files: dict[str, Path]) -> dict[str, tuple[str, bytes]]:
    return {name: (path.name, path.read_bytes()) for name, path in files.items()}
