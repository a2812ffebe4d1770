"""The gateway bench's prepared messages equal those of the protocol."""

from __future__ import annotations

from bench.gateway_parts import STREAM_TOKENS, VOCABULARY, WORKER, Progress, item_tails, next_frame, words, write_model
from bench.report import table
from motet.services.gateway.openai.prompt import Prompts
from motet.shared.bus import decode
from motet.shared.wire.stream import TokenFrame
from tests.support_worker import generate_request


def test_frames_put_together_from_bytes_are_frames() -> None:
    running = [Progress(generate_request(name)) for name in ("a", "some-longer-id" * 5)]
    tails = item_tails()
    for step in range(STREAM_TOKENS):
        frame = decode(next_frame(step, running, tails), TokenFrame)
        assert (frame.worker_id, frame.step) == (WORKER, step)
        assert [item.request_id for item in frame.items] == ["a", "some-longer-id" * 5]
        last = step == STREAM_TOKENS - 1
        for item in frame.items:
            finish = "length" if last else None
            assert (item.epoch, item.index, item.tokens, item.finish) == (0, step, [step % VOCABULARY], finish)


def test_the_benchs_tokenizer_decodes_to_the_texts_of_the_rivals_events(tmp_path) -> None:  # type: ignore[no-untyped-def]
    write_model(tmp_path / "bench")
    tokenizer = Prompts(tmp_path / "bench").tokenizer
    assert tokenizer.decode([0, 1, 999]) == words()[0] + words()[1] + words()[999]


def test_a_table_is_aligned() -> None:
    lines = table("title", ["name", "value"], [["a", 1.5], ["long name", 12345]]).splitlines()
    assert lines == ["title", "name        value", "---------  ------", "a           1.500", "long name  12,345"]
