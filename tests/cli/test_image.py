"""Promise: `motet image` draws with the adapters that it is given, shows the steps and the picture, and writes the file."""

from __future__ import annotations

import asyncio
import base64
import io
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from motet.cli import pictures
from motet.cli.image import image, request_of
from motet.shared.bus import Bus
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import Connect, assigned
from tests.services.gateway.support_pictures import drawing_mesh, file_of, hole, image_of, paint


@pytest.fixture
async def mesh(connect: Connect, bus: Bus, nats_url: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    async with drawing_mesh(connect, bus, nats_url, tmp_path) as mesh:
        yield mesh


async def run(mesh: Mesh, *words: str, pictures: int = 1) -> tuple[Result, list[Any]]:
    """The command's end, and the requests that a worker got for it."""
    asking = asyncio.create_task(
        asyncio.to_thread(lambda: CliRunner().invoke(image, ["--url", mesh.url, *words], catch_exceptions=False))
    )
    await assigned(mesh.first, pictures)
    for request in mesh.first.assigned:
        await paint(mesh.first, request)
    return await asking, mesh.first.assigned


async def test_a_picture_with_adapters_is_written_to_a_file(mesh: Mesh, tmp_path: Path) -> None:
    out = tmp_path / "a.webp"
    words = ["a red circle", "--adapter", "sepia=0.8", "--adapter", "frame", "--size", "64x32", "--steps", "3"]
    ended, [request] = await run(mesh, *words, "--seed", "3", "--guidance", "2", "--sampler", "ddim", "--out", str(out))
    assert ended.exit_code == 0, ended.output
    assert (out.read_bytes(), ended.stderr) == (b"picture 3", f"{out}, seed 3\n")
    asked = image_of(request)
    assert (asked.width, asked.height, asked.steps, asked.guidance, asked.format) == (64, 32, 3, 2.0, "webp")
    assert [(one.ref.name, one.weight) for one in request.adapters] == [("sepia", 0.8), ("frame", 1.0)]


async def test_several_pictures_get_numbers(mesh: Mesh, tmp_path: Path) -> None:
    ended, _ = await run(mesh, "x", "-n", "2", "--seed", "7", "--out", str(tmp_path / "a.png"), pictures=2)
    assert ended.exit_code == 0, ended.output
    assert [(tmp_path / f"a-{i}.png").read_bytes() for i in (1, 2)] == [b"picture 7", b"picture 8"]


async def test_a_picture_is_edited_with_its_mask(mesh: Mesh, tmp_path: Path) -> None:
    source, mask = tmp_path / "s.png", tmp_path / "m.png"
    source.write_bytes(file_of())
    mask.write_bytes(hole())
    words = ["x", "--init", str(source), "--mask", str(mask), "--strength", "0.5", "--adapter", "frame=-1"]
    ended, [request] = await run(mesh, *words, "--out", str(tmp_path / "b.jpg"))
    assert ended.exit_code == 0, ended.output
    asked = image_of(request)
    assert (asked.kind, asked.strength, asked.format, len(request.images)) == ("inpaint", 0.5, "jpeg", 2)
    assert [(one.ref.name, one.weight) for one in request.adapters] == [("frame", -1.0)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["x"], "--out: without a terminal"),
        (["x", "--out", "a.gif"], "--out: a.gif"),
        (["x", "--adapter", "a=much", "--out", "a.png"], "--adapter: 'a=much'"),
        (["x", "--mask", __file__, "--out", "a.png"], "--mask: it belongs"),
        (["x", "--strength", "0.5", "--out", "a.png"], "--strength: it belongs"),
        (["x", "--init", "nothing.png", "--out", "a.png"], "--init"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(words: list[str], said: str) -> None:
    ended = CliRunner().invoke(image, ["--url", "http://127.0.0.1:1", *words])
    assert ended.exit_code == 2 and said in ended.stderr


def test_names_of_adapters_may_have_dots_and_weights_signs() -> None:
    settings = {"adapters": ("acme/v1.5=-0.25", "plain"), "seed": None}
    body = request_of("x", settings, None)
    assert body["adapters"] == [{"name": "acme/v1.5", "weight": -0.25}, {"name": "plain"}]
    assert "seed" not in body and body["stream"] is True
    with pytest.raises(click.UsageError):
        request_of("x", settings, Path("a"))


@pytest.mark.parametrize(
    "words", [["--adapter", "a=nan"], ["--adapter", "a=inf"], ["--guidance", "nan"], ["--strength", "nan"]]
)
def test_numbers_that_json_cannot_carry_are_refused_by_option(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(file_of())
    result = CliRunner().invoke(image, ["x", *words, "--init", str(tmp_path / "a.png"), "--out", str(tmp_path / "b.png")])
    assert result.exit_code == 2 and f"Error: {words[0]}: " in result.output


@pytest.mark.parametrize(
    ("environ", "kitty"),
    [
        ({"TERM": "xterm-kitty"}, True),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, True),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "ghostty"}, True),
        ({"TERM": "screen", "KITTY_WINDOW_ID": "1"}, False),
        ({"TERM": "xterm-kitty", "TMUX": "/tmp/x"}, False),
        ({"TERM": "xterm-256color"}, False),
        ({}, False),
    ],
)
def test_a_terminal_gets_pictures_in_the_way_that_it_understands(environ: dict[str, str], kitty: bool) -> None:
    assert pictures.speaks_kitty(environ) is kitty


def test_half_blocks_show_two_rows_of_pixels_in_one_of_text() -> None:
    picture = Image.new("RGB", (2, 2), (255, 0, 0))
    picture.putpixel((0, 1), (0, 0, 255))
    file = io.BytesIO()
    picture.save(file, "PNG")
    shown = pictures.as_half_blocks(file.getvalue(), columns=2)
    red, blue = "255;0;0", "0;0;255"
    assert shown == f"\033[38;2;{red};48;2;{blue}m▀\033[38;2;{red};48;2;{red}m▀\033[0m\n"
    lines = pictures.as_half_blocks(file_of(size=(300, 150)), columns=500).splitlines()
    assert len(lines) == 16 and all(line.count("▀") == 64 for line in lines)


def test_kittys_protocol_carries_the_picture_in_pieces() -> None:
    noisy = io.BytesIO()
    Image.effect_noise((90, 90), 80).save(noisy, "WEBP", lossless=True)
    sent = pictures.as_kitty(noisy.getvalue())
    pieces = re.findall(r"\033_G([^;]*);([^\033]*)\033\\", sent)
    assert len(pieces) > 1 and pieces[0][0].startswith("f=100,a=T,") and all(len(data) <= 4096 for _, data in pieces)
    assert [how.split(",")[-1] for how, _ in pieces] == ["m=1"] * (len(pieces) - 1) + ["m=0"]
    with Image.open(io.BytesIO(base64.b64decode("".join(data for _, data in pieces)))) as shown:
        assert (shown.format, shown.size) == ("PNG", (90, 90))
