"""Promise: lengths are predicted from the prompt where it is informative, with calibrated quantiles, in bounded memory."""

from __future__ import annotations

import random

import numpy as np
import pytest

from motet.policies.lengths.calibration import BINS, Calibration
from motet.policies.lengths.features import (
    FEATURES_MAX,
    SPACE,
    TEXT_IDS,
    excerpt,
    pack,
    request_features,
    steps,
    text_features,
    unpack,
)
from motet.policies.lengths.model import Curve, falling
from motet.policies.lengths.predictor import FIRST_FIT, LengthPredictor
from motet.services.predictor import codec as coding
from motet.services.predictor.fit import fit
from motet.shared.model import SamplingParams

TOPICS = ["rivers", "engines", "poems", "markets", "birds", "castles", "bread", "glaciers", "trains", "violins"]
FORMS = {"answer yes or no:": 2, "name one of the": 8, "list five facts about": 60, "write a long story about": 300}


def features(text: str, *, max_tokens: int = 512, system: str = "") -> bytes:
    sampling = SamplingParams(max_tokens=max_tokens)
    return pack(text_features(text) + request_features(len(text) // 4, sampling, stops=0, turns=1, system=system))


def prompts(count: int, seed: int = 1) -> list[tuple[str, int]]:
    """Prompts of four forms, and lengths that depend on the form and on chance."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        form, mean = draw.choice(list(FORMS.items()))
        text = f"{form} {draw.choice(TOPICS)} and {draw.choice(TOPICS)}"
        found.append((text, max(1, round(mean * draw.lognormvariate(0.0, 0.3)))))
    return found


def taught(requests: list[tuple[str, int]], *, adapter: str = "", **limits: int) -> LengthPredictor:
    predictor = LengthPredictor(**({"max_adapters": 50, "window": 1000} | limits))
    for text, tokens in requests:
        predictor.observe(adapter, features(text), tokens)
        refit(predictor)
    return predictor


def refit(predictor: LengthPredictor) -> None:
    if predictor.fit_due():
        found = fit([unpack(row.features) for row in predictor.window], [row.tokens for row in predictor.window])
        predictor.adopt(found.model, found.levels)


def p50(predictor: LengthPredictor, text: str, adapter: str = "") -> int:
    return predictor.estimate(adapter, features(text), 4096).estimate.p50_tokens


# ---- features


def test_features_are_small_numbers_that_repeat_for_the_same_prompt_in_every_process():
    packed = features("Name three rivers.")
    assert packed == features("name THREE rivers.")
    assert packed != features("Name three castles.")
    assert b"river" not in packed
    ids = unpack(packed)
    assert ids.max() < SPACE and list(ids) == sorted(set(ids))
    assert sorted(text_features("Name three rivers."))[:4] == [578, 7686, 9130, 19021]  # gateways of one mesh must agree


def test_a_prompt_of_any_length_and_content_has_a_bounded_number_of_features():
    for text in ("", " ", "\ud800 lone surrogate", "a" * 100_000, " ".join(str(n) for n in range(50_000)), "\x00漢字" * 9000):
        assert 0 < len(unpack(features(text))) <= FEATURES_MAX
    assert len(excerpt("word " * 10_000)) < 1000
    assert unpack(bytes(range(256)) * 64).size <= FEATURES_MAX and unpack(b"\x01").size == 0


def test_the_beginning_and_the_end_of_a_long_prompt_count():
    middle = "lorem ipsum " * 500
    first = features(f"summarize {middle} in one word")
    assert first != features(f"translate {middle} in one word")
    assert first != features(f"summarize {middle} in ten pages")


def test_limits_and_system_prompts_are_features_of_their_own():
    assert features("hello", max_tokens=16) != features("hello", max_tokens=1024)
    assert features("hello", system="be brief") != features("hello", system="be thorough")
    assert all(TEXT_IDS <= one < SPACE for one in request_features(9, SamplingParams(), stops=1, turns=2, system="x"))


def test_counts_are_told_apart_in_half_octaves():
    assert [steps(n) for n in (0, 1, 2, 3, 4, 5, 6, 8, 11, 12, 16, 24)] == [0, 1, 2, 3, 4, 4, 5, 6, 6, 7, 8, 9]


# ---- predictions


def test_prompts_of_one_adapter_get_different_predictions_once_a_model_was_fitted():
    predictor = taught(prompts(400))
    found = {form: p50(predictor, f"{form} glaciers and bread") for form in FORMS}
    for form, mean in FORMS.items():
        assert mean / 1.7 <= found[form] <= mean * 1.7, found
    assert predictor.estimate("", features("list five facts about bread"), 4096).basis == "prompt"


def test_half_and_nine_tenths_of_new_requests_end_below_their_quantiles():
    predictor = taught(prompts(600))
    below = np.zeros(2)
    fresh = prompts(400, seed=2)
    for text, tokens in fresh:
        found = predictor.estimate("", features(text), 4096).estimate
        below += tokens <= found.p50_tokens, tokens <= found.p90_tokens
        predictor.observe("", features(text), tokens)
        refit(predictor)
    assert below / len(fresh) == pytest.approx([0.5, 0.9], abs=0.06)


def test_before_the_first_fit_an_adapters_past_lengths_answer():
    predictor = taught([("hello", 9)] * (FIRST_FIT - 1), adapter="d")
    found = predictor.estimate("d", features("hello"), 4096)
    assert (found.basis, found.estimate.p50_tokens) == ("learned", 9)
    assert LengthPredictor(9, 99).estimate("d", b"", 50).basis == "default"


def test_a_fit_is_due_after_the_first_requests_and_then_after_each_eighth_of_the_window():
    """At least so many requests as for the first fit. An eighth of a window of 600 requests is 75."""
    many = prompts(1000)

    def until_due(predictor: LengthPredictor) -> int:
        for count, (text, tokens) in enumerate(many):
            if predictor.fit_due():
                return count
            predictor.observe("", features(text), tokens)
        raise AssertionError("no fit was due")

    first = LengthPredictor(50, 600)
    assert until_due(first) == FIRST_FIT
    model = fit([unpack(row.features) for row in first.window], [row.tokens for row in first.window]).model
    first.adopt(model, ())
    assert until_due(first) == FIRST_FIT
    full = LengthPredictor(50, 600)
    for text, tokens in many:
        full.observe("", features(text), tokens)
    full.adopt(model, ())
    assert until_due(full) == 75


def test_a_request_without_features_is_answered_from_its_adapters_past():
    predictor = taught(prompts(200))
    assert predictor.estimate("", b"", 4096).basis == "learned"


def test_an_adapter_that_answers_briefly_is_predicted_to_although_its_prompts_ask_for_stories():
    predictor = taught(prompts(400))
    story = "write a long story about castles"
    for text, _ in prompts(60, seed=3):
        predictor.observe("terse", features(text), 4)
    refit(predictor)
    assert p50(predictor, story, "terse") <= 8
    assert p50(predictor, story) > 150


def test_where_prompts_tell_nothing_the_adapters_histogram_is_used():
    draw = random.Random(5)
    predictor = LengthPredictor(50, 1000)
    for number in range(500):
        adapter, mean = ("a", 4) if number % 2 else ("b", 900)
        noise = " ".join(draw.choice(TOPICS) for _ in range(12))
        predictor.observe(adapter, features(noise), max(1, round(mean * draw.lognormvariate(0, 0.05))))
        refit(predictor)
    for adapter, mean in (("a", 4), ("b", 900)):
        assert predictor.estimate(adapter, features("poems"), 4096).estimate.p50_tokens == pytest.approx(mean, rel=0.15)


def test_a_prediction_stays_within_what_the_request_allows():
    predictor = taught(prompts(200))
    story = features("write a long story about birds")
    assert predictor.estimate("", story, 20).estimate.p90_tokens == 20
    brief = predictor.estimate("", features("answer yes or no: birds"), 700, min_tokens=700).estimate
    assert (brief.p50_tokens, brief.p90_tokens) == (700, 700)
    assert predictor.estimate("", story, 0).estimate.p50_tokens == 1


def test_a_change_of_what_prompts_lead_to_is_followed():
    predictor = taught(prompts(400), window=300)
    for text, tokens in prompts(400, seed=7):
        predictor.observe("", features(text), 301 - min(300, tokens))
        refit(predictor)
    assert p50(predictor, "answer yes or no: trains") > 200
    assert p50(predictor, "write a long story about trains") < 100


# ---- memory


def test_window_adapters_and_calibration_are_bounded():
    predictor = LengthPredictor(max_adapters=10, window=64)
    for number, (text, tokens) in enumerate(prompts(300)):
        predictor.observe(f"d{number}", features(text), tokens)
        refit(predictor)
    assert len(predictor.window) == 64 and predictor.lengths.adapters == 10 and len(predictor.calibration.adapters) <= 10


def test_a_state_gives_another_predictor_the_same_answers():
    first, second = taught(prompts(300), adapter="d"), LengthPredictor(50, 1000)
    second.restore(coding.decompress(coding.compress(first.state()), type(first.state())))
    for text, _ in prompts(20, seed=4):
        for adapter in ("d", "unknown"):
            assert second.estimate(adapter, features(text), 999) == first.estimate(adapter, features(text), 999)
    assert second.estimate("d", b"", 999) == first.estimate("d", b"", 999)


# ---- parts


def test_lengths_that_are_all_equal_give_nothing_to_fit():
    with pytest.raises(ValueError, match="same length"):
        fit([unpack(features("a")), unpack(features("b"))] * 10, [7] * 20)


def test_a_batch_is_predicted_as_its_requests_one_by_one():
    model = fit([unpack(features(text)) for text, _ in prompts(100)], [tokens for _, tokens in prompts(100)]).model
    rows = [unpack(features(text)) for text, _ in prompts(5, seed=9)]
    rows.insert(2, np.empty(0, np.int64))
    rows.append(np.empty(0, np.int64))
    assert np.allclose(model.above(rows), np.vstack([model.above([row]) for row in rows]), atol=1e-5)
    assert model.above([]).shape == (0, len(model.edges))


def test_a_curve_reads_lengths_where_it_put_levels():
    curve, above = Curve(np.array([10.0, 100.0]), 400.0), np.array([0.6, 0.2])
    assert curve.tokens(above, (0.4, 0.8)) == pytest.approx([10, 100], abs=0.01)
    assert curve.level(above, 10) == pytest.approx(0.4, abs=0.05)
    assert curve.share_between(above[None], (10, 100))[0] == pytest.approx([0.4, 0.4, 0.2])
    assert (np.diff(falling(np.array([0.4, 1.2, -0.1, 0.3]))) <= 0).all()


def test_a_model_that_is_always_too_high_is_corrected():
    calibration = Calibration(max_adapters=2)
    for level in np.random.default_rng(1).permutation(np.linspace(0.0, 0.5, 400)):
        calibration.observe("d", level, model_loss=1.0, adapter_loss=2.0)
    assert calibration.levels("d", (0.5, 0.9)) == pytest.approx([0.25, 0.45], abs=1.5 / BINS)
    assert calibration.model_is_better("d") and calibration.model_is_better("unknown")
    for _ in range(600):
        calibration.observe("d", 0.5, model_loss=2.0, adapter_loss=1.0)
    assert not calibration.model_is_better("d")


def test_an_adapter_whose_answers_end_above_the_models_quantiles_gets_longer_ones():
    predictor = taught(prompts(500))
    for adapter, level in [("long", 0.98), ("short", 0.02)] * 60:
        predictor.calibration.observe(adapter, level, model_loss=0.1, adapter_loss=1.0)
    text = "list five facts about birds and bread"
    assert p50(predictor, text, "long") > 1.3 * p50(predictor, text, "short")
