"""Messages of pictures are additions: text messages encode to the same bytes, and old messages are still read."""

from __future__ import annotations

import msgspec

from motet.shared.model import AdapterRef, ImageParams, RequestBrief, SamplingParams, Slo, Weighted
from motet.shared.wire.request import GenerateRequest, pack_tokens
from motet.shared.wire.stream import Picture, StreamItem, TokenFrame

STYLE = AdapterRef(name="sepia", digest="d1", rank=8, size_bytes=100)
FRAME = AdapterRef(name="frame", digest="d2", rank=4, size_bytes=50)


def picture_request(**more: object) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt=pack_tokens([1, 2]),
        sampling=SamplingParams(seed=3),
        gateway_id="g",
        **more,  # type: ignore[arg-type]
    )


def test_a_text_request_encodes_to_the_bytes_that_it_had_without_pictures() -> None:
    request = picture_request(adapter=STYLE, slo=Slo(ttft_slo_ms=5.0))
    assert msgspec.msgpack.encode(request) == (
        b"\xde\x00\x06\xaarequest_id\xa1r\xa6prompt\xc4\x08\x01\x00\x00\x00\x02\x00\x00\x00\xa8sampling\xde\x00\x01\xa4seed\x03"
        b"\xa3slo\x81\xabttft_slo_ms\xcb@\x14\x00\x00\x00\x00\x00\x00\xa7adapter\x84\xa4name\xa5sepia\xa6digest\xa2d1\xa4rank\x08"
        b"\xaasize_bytesd\xaagateway_id\xa1g"
    )


def test_items_and_briefs_only_have_fields_appended() -> None:
    item = StreamItem("r", 1, 4, [9], prompt_tokens=7)
    encoded = msgspec.msgpack.decode(msgspec.msgpack.encode(item))
    assert encoded == ["r", 1, 4, [9], None, None, None, None, 0, 0.0, None, b"", 7, None, b""]
    brief = RequestBrief("r", 1, "d", 8, 2, 0, 4, "waiting", cached_tokens=1)
    encoded = msgspec.msgpack.decode(msgspec.msgpack.encode(brief))
    assert encoded == ["r", 1, "d", 8, 2, 0, 4, "waiting", 0.0, 0.0, "", 1.0, 1, None]


def test_items_and_briefs_of_before_are_still_read() -> None:
    old = ["r", 1, 4, [9], None, None, None, None, 0, 0.0, None, b"", 7]
    frame = msgspec.msgpack.decode(msgspec.msgpack.encode(["w", 0, [old]]), type=TokenFrame)
    assert frame.items == [StreamItem("r", 1, 4, [9], prompt_tokens=7)]
    brief = msgspec.msgpack.decode(msgspec.msgpack.encode(["r", 1, "", 0, 2, 0, 4, "waiting"]), type=RequestBrief)
    assert brief.rows == 1.0
    assert brief.adapter_digests == ()


def test_a_picture_request_survives_the_wire() -> None:
    image = ImageParams(width=512, height=1024, steps=30, kind="inpaint", state=b"latents", state_step=10)
    request = picture_request(image=image, adapters=(Weighted(STYLE, 0.8), Weighted(FRAME)), needs={"draws": "model"})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=GenerateRequest) == request


def test_a_picture_survives_the_wire() -> None:
    picture = Picture(b"\x89PNG", "png", 64, 64, preview=False, seed=3)
    frame = TokenFrame("w", 1, [StreamItem("r", 0, 30, [30], "stop", picture=picture, state=b"s")])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=TokenFrame) == frame


def test_the_adapters_of_a_request_are_told_whichever_way_they_were_given() -> None:
    assert picture_request().weighted == ()
    assert picture_request(adapter=STYLE).weighted == (Weighted(STYLE, 1.0),)
    assert picture_request(adapters=(Weighted(STYLE, 0.5), Weighted(FRAME, 2.0))).weighted == (
        Weighted(STYLE, 0.5),
        Weighted(FRAME, 2.0),
    )


def test_rows_count_guidance_and_pixels() -> None:
    assert ImageParams(width=512, height=512, steps=1, guidance=1.0).rows == 1.0
    assert ImageParams(width=512, height=512, steps=1, guidance=7.5).rows == 2.0
    assert ImageParams(width=1024, height=512, steps=1, guidance=7.5).rows == 4.0
