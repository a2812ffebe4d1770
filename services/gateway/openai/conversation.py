"""The messages of a chat: their JSON schema, the conversation that a chat template reads, and the images in it. No HTTP here.

    texts(messages)         each content is one string, which every template reads
    parts(messages)         each content is a list of {"type": "text", "text": ...} and {"type": "image"}, which templates of
                            models that take images read
    take_images(messages)   the images themselves, in the order of those parts

An image comes in the request as a `data:` URL. Others are refused: a gateway fetches nothing.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any, Protocol

from motet.services.gateway.openai import arguments
from motet.services.gateway.openai.nesting import check_depth
from motet.shared.errors import BadRequest
from motet.shared.model import IMAGES_MAX
from motet.shared.wire.request import Image

SCHEMA = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "null", "description": "of an assistant's message"},
                {
                    "type": "array",
                    "items": {
                        "anyOf": [
                            {
                                "type": "object",
                                "required": ["type", "text"],
                                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                            },
                            {
                                "type": "object",
                                "required": ["type", "image_url"],
                                "properties": {
                                    "type": {"const": "image_url"},
                                    "image_url": {
                                        "type": "object",
                                        "required": ["url"],
                                        "additionalProperties": False,
                                        "properties": {
                                            "url": {
                                                "type": "string",
                                                "pattern": "^data:image/[^,]*;base64,",
                                                "description": "PNG, JPEG, WebP or GIF as a data: URL.",
                                            },
                                            "detail": {
                                                "enum": ["auto", "low", "high", None],
                                                "description": "Accepted without effect: the model's own size is used.",
                                            },
                                        },
                                    },
                                },
                                "description": f"At most {IMAGES_MAX} in a request; needs a model that takes images.",
                            },
                        ]
                    },
                },
            ]
        },
    },
    "anyOf": [
        {"properties": {"role": {"const": "assistant"}}},
        {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
    ],
    "description": "Other properties are passed to the chat template. Only an assistant's message may have no content.",
}


class Reader(Protocol):
    """A chat template: whether it reads contents as lists of parts."""

    @property
    def takes_images(self) -> bool: ...


_DATA_URL = re.compile(r"data:image/[a-zA-Z0-9.+-]+;base64,")
_MAGIC = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8|RIFF....WEBP", re.DOTALL)


def texts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the texts of each content joined to one string. Raises BadRequest naming the message or part."""
    return [_message(message, i, whole=True) for i, message in enumerate(messages)]


def parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with each content as a list of parts. Raises BadRequest naming the message or part."""
    return [_message(message, i, whole=False) for i, message in enumerate(messages)]


def read_by(messages: list[dict[str, Any]], template: Reader) -> list[dict[str, Any]]:
    """The messages in the form that this chat template reads. Raises BadRequest naming the message or part."""
    return parts(messages) if template.takes_images else texts(messages)


def text_of(message: dict[str, Any]) -> str:
    """The text of a message that `texts` or `parts` returned."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part["type"] == "text")
    return content or ""


def take_images(messages: list[dict[str, Any]]) -> list[Image]:
    """The images of the messages. Their URLs are removed from the messages, so that no image is kept twice.

    Raises BadRequest naming the part that is no image, or that is one image too many.
    """
    found: list[Image] = []
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("type") == "image_url":
                at = f"messages[{i}].content[{j}]"
                if len(found) == IMAGES_MAX:
                    raise BadRequest(f"{at}: a request may have {IMAGES_MAX} images", param=at)
                found.append(Image(data=_read(part, at), param=at))
                part["image_url"] = None
    return found


def _read(part: dict[str, Any], at: str) -> bytes:
    """The bytes of an image."""
    given = part.get("image_url")
    where = f"{at}.image_url"
    if not isinstance(given, dict):
        raise BadRequest(f"{where}: expected an object with a url", param=where)
    if unknown := next((name for name in given if name not in ("url", "detail")), None):
        raise BadRequest(f"{where}.{unknown}: there is no such field", param=f"{where}.{unknown}")
    if given.get("detail") not in (None, "auto", "low", "high"):
        raise BadRequest(f"{where}.detail: expected auto, low or high", param=f"{where}.detail")
    url, where = given.get("url"), f"{where}.url"
    if not isinstance(url, str):
        raise BadRequest(f"{where}: expected a string", param=where)
    found = _DATA_URL.match(url)
    if found is None:
        raise BadRequest(
            f"{where}: images are not fetched from elsewhere; expected data:image/...;base64,... with the image itself",
            param=where,
        )
    try:
        data = base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest(f"{where}: what follows the comma is not base64", param=where) from None
    if not _MAGIC.match(data):
        raise BadRequest(f"{where}: this is no PNG, JPEG, WebP or GIF image", param=where)
    return data


def _message(message: dict[str, Any], i: int, *, whole: bool) -> dict[str, Any]:
    where = f"messages[{i}]"
    role, content = message.get("role"), message.get("content")
    for name, value in message.items():
        if isinstance(value, dict | list):
            check_depth(value, f"{where}.{name}")
    if not isinstance(role, str) or not role:
        raise BadRequest(f"{where}.role: expected a string", param=f"{where}.role")
    if isinstance(content, list):
        message = message | {"content": [_part(part, f"{where}.content[{j}]") for j, part in enumerate(content)]}
        message = message | {"content": text_of(message)} if whole else message
    elif isinstance(content, str):
        message = message if whole else message | {"content": [{"type": "text", "text": content}]}
    elif content is not None or role != "assistant":
        raise BadRequest(f"{where}.content: expected a string or parts of type text and image_url", param=f"{where}.content")
    if message.get("tool_calls"):
        message = message | {"tool_calls": _calls(message["tool_calls"], f"{where}.tool_calls")}
    return message


def _part(part: Any, at: str) -> dict[str, Any]:
    """A part in the form that chat templates read."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "image_url":
        return {"type": "image"}
    if kind != "text" or not isinstance(part.get("text"), str):
        given = repr(kind[:100]) if isinstance(kind, str) else type(kind).__name__  # what a client sent may be long
        raise BadRequest(f"{at}: expected a part of type text, with a text string, or image_url, not {given}", param=at)
    return {"type": "text", "text": part["text"]}


def _calls(given: Any, where: str) -> list[dict[str, Any]]:
    """Earlier tool calls with their arguments as objects, which is what chat templates read."""
    if not isinstance(given, list):
        raise BadRequest(f"{where}: expected a list of calls", param=where)
    return [_call(call, i, where) for i, call in enumerate(given)]


def _call(call: Any, i: int, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}: call {i}: expected a function with its name", param=where)
    given = function.get("arguments")
    try:
        value = arguments.read(given) if isinstance(given, str) else given
    except ValueError as error:
        reason = f"{where}: call {i}: expected the function's arguments as the text of a JSON object: {error}"
        raise BadRequest(reason, param=where) from None
    return call | {"function": function | {"arguments": arguments.object_of(value)}}
