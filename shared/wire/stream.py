"""Token frames: worker -> gateway, one message per gateway per engine step."""

from __future__ import annotations

import msgspec

from motet.shared.errors import ErrorInfo
from motet.shared.model import FinishReason, PictureFormat


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of a drawn token and of the most likely tokens, most likely first."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class Picture(msgspec.Struct, array_like=True, frozen=True):
    """A picture, or a preview of one, as the bytes of its file.

    A large one is in the object store `subjects.PICTURES`: `data` is empty, `object_name` and the `sha256` of the file are set.
    """

    data: bytes
    format: PictureFormat
    width: int  # pixels, as `height`
    height: int
    preview: bool
    seed: int
    object_name: str = ""
    sha256: bytes = b""


class StreamItem(msgspec.Struct, array_like=True):
    """New tokens of one request. `tokens[0]` has output index `index`.

    `finish` is set on the last item. With finish "stop" the last token is the EOS or stop token that ended it
    (`stop_token` repeats its id); it counts as usage and is not shown. With finish "error", `error` says why.

    Of a picture, `tokens` are the numbers of its denoising steps, which are their indices too. The last item has one more, the
    number of all steps that are run, with finish "stop" and the picture.
    """

    request_id: str
    epoch: int
    index: int
    tokens: list[int]
    finish: FinishReason | None = None
    stop_token: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: ErrorInfo | None = None
    cached_tokens: int = 0  # on the first item: prompt tokens served from the prefix cache
    queue_ms: float = 0.0  # on the first item: from arrival at the worker to its first prefill chunk
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # on the first item: one per prompt token, None for the first
    embedding: bytes = b""  # little-endian float32; the item has finish "stop" and no tokens
    prompt_tokens: int = 0  # on the first item of a prompt with images: its tokens with theirs
    picture: Picture | None = None  # a preview, or the picture itself on the last item
    state: bytes = b""  # a checkpoint of the picture after the item's last step (`ImageParams.state`)


class TokenFrame(msgspec.Struct, array_like=True):
    """All new tokens of one gateway's requests after one engine step."""

    worker_id: str
    step: int
    items: list[StreamItem]
