"""Promise: a reading is judged by what is on the device and by its answers; types that round more get more tolerance."""

from __future__ import annotations

import numpy as np
import pytest

from motet.policies.worker.probe import (
    PROMPT_TOKENS,
    QUARANTINED,
    VALUES,
    Account,
    Reading,
    Reference,
    Verdict,
    blank,
    compare_accounts,
    distance,
    is_zero,
    judge,
    made_reference,
    packed,
    prompt,
    tolerance,
    unpacked,
)

BASE = np.array([-4.0, -6.0] * 7 + [-5.0], np.float32)
"""Spread: the root of 14/15, of seven values one below and seven one above the mean and one at it."""
SPREAD = float(np.sqrt(14 / 15))


def account(**norms: list[tuple[float, float]]) -> Account:
    return {module: np.array(values) for module, values in norms.items()}


FILE = account(q_proj=[(2.0, 3.0), (2.0, 3.0)], v_proj=[(1.0, 0.5), (0.0, 0.0)])


def reading(adapter: np.ndarray = BASE + 1, *, base: np.ndarray = BASE, found: Account | None = FILE, **more) -> Reading:
    return Reading(digest="d", base=base, adapter=adapter.astype(np.float32), account=found, **more)


def reference(adapter: np.ndarray = BASE + 1, base: np.ndarray = BASE, dtype: str = "float32") -> Reference:
    return Reference(
        base=packed(base), adapter=packed(adapter.astype(np.float32)), dtype=dtype, made_by="native on w1", made_unix_ms=1
    )


def verdict(one: Reading, against: Reference | None = None, *, dtype: str = "float32", **more: str) -> Verdict:
    return judge(one, FILE, against, dtype=dtype, **more).verdict


def test_the_prompt_is_fixed_and_in_every_vocabulary():
    assert VALUES == PROMPT_TOKENS - 1 == 15
    assert prompt(128_256) == prompt(128_256) and len(prompt(128_256)) == PROMPT_TOKENS
    assert prompt(1000)[:3] == [11, (11 + 2654435761) % 1000, (11 + 2 * 2654435761) % 1000]
    assert all(0 <= token < 7 for token in prompt(7))


def test_a_distance_is_the_root_mean_square_and_infinite_for_what_cannot_be_compared():
    assert distance(np.array([1.0, 2.0]), np.array([4.0, 6.0])) == pytest.approx((25 / 2) ** 0.5)
    assert distance(BASE, BASE) == 0.0
    assert distance(BASE, BASE[:3]) == float("inf")
    assert distance(np.array([1.0, np.nan]), np.array([1.0, 2.0])) == float("inf")
    assert distance(np.array([1.0, 2.0]), np.array([1.0, np.inf])) == float("inf")


@pytest.mark.parametrize(
    ("dtypes", "quantization", "share"),
    [
        (("float32",), "none", 1e-3),
        (("float32", "float16"), "none", 3e-2),
        (("bfloat16", "float32"), "none", 0.12),
        (("float32",), "int8", 0.2),
        (("bfloat16",), "int4", 0.3),
        (("bfloat16",), "awq", 0.3),
        (("float8",), "none", 0.12),
    ],
)
def test_the_tolerance_is_a_share_of_the_spread_that_the_coarser_side_gives(dtypes, quantization, share):
    assert tolerance(BASE, *dtypes, quantization=quantization) == pytest.approx(share * SPREAD)


def test_answers_that_hardly_differ_still_have_the_tolerance_of_float32():
    assert tolerance(np.full(VALUES, -5.0), "float32") == 1e-5


def test_a_fingerprint_survives_as_bytes():
    assert unpacked(packed(BASE)).tolist() == BASE.tolist() and len(packed(BASE)) == 4 * VALUES
    made = made_reference(reading(), dtype="bfloat16", made_by="w", now_unix_ms=7)
    assert (unpacked(made.base) == BASE).all() and (unpacked(made.adapter) == BASE + 1).all()
    assert (made.dtype, made.made_by, made.made_unix_ms) == ("bfloat16", "w", 7)


# ---- accounts


def test_equal_accounts_say_nothing_and_rounding_by_a_cast_is_no_difference():
    assert compare_accounts(FILE, FILE, "float32") == ""
    cast = account(q_proj=[(2.003, 3.0), (2.0, 2.995)], v_proj=[(1.0, 0.5), (0.0, 0.0)])
    assert compare_accounts(FILE, cast, "bfloat16") == ""
    assert compare_accounts(FILE, cast, "float32") == "altered on the device: layers.0.q_proj, layers.1.q_proj"


def test_what_is_missing_is_named_before_what_is_altered():
    found = account(q_proj=[(2.0, 0.0), (2.0, 6.0)])
    said = compare_accounts(FILE, found, "float32")
    assert said == "missing on the device: layers.0.q_proj, v_proj; altered on the device: layers.1.q_proj"


def test_a_module_of_zeros_or_of_other_layers_or_beyond_the_file_is_named():
    assert compare_accounts(FILE, FILE | account(v_proj=[(0.0, 0.0)]), "float32") == "missing on the device: v_proj"
    assert compare_accounts(FILE, FILE | account(v_proj=[(1.0, 0.5)]), "float32") == "altered on the device: v_proj"
    assert compare_accounts(FILE, FILE | account(o_proj=[(1.0, 1.0)]), "float32") == "altered on the device: o_proj"
    beyond = FILE | account(v_proj=[(1.0, 0.5), (1.0, 0.5)])
    assert compare_accounts(FILE, beyond, "float32") == "altered on the device: layers.1.v_proj"


def test_at_most_three_are_named():
    many = account(q_proj=[(1.0, 1.0)] * 5)
    said = compare_accounts(many, account(q_proj=[(1.0, 2.0)] * 5), "float32")
    assert said == "altered on the device: layers.0.q_proj, layers.1.q_proj, layers.2.q_proj and 2 more"


def test_an_adapter_is_zero_when_every_product_is():
    assert is_zero(account(q_proj=[(2.0, 0.0), (0.0, 3.0)])) and is_zero({})
    assert not is_zero(account(q_proj=[(2.0, 0.0), (1e-9, 3.0)]))


# ---- verdicts


def test_without_a_reference_an_effect_is_good_and_none_is_ignored():
    assert verdict(reading()) == "good"
    assert verdict(reading(BASE)) == "ignored"
    assert judge(reading(BASE, found=None), None, None, dtype="float32").verdict == "small", "it may be a small one"


def test_a_tiny_update_without_an_effect_is_too_small_to_tell():
    tiny = account(q_proj=[(1e-4, 1.0), (1e-4, 1.0)])
    assert judge(reading(BASE, found=tiny), tiny, None, dtype="float32").verdict == "small"
    larger = account(q_proj=[(1e-1, 0.9), (0.0, 0.0)])
    assert judge(reading(BASE, found=larger), larger, None, dtype="float32").verdict == "ignored"
    assert judge(reading(BASE, found=larger), larger, None, dtype="bfloat16").verdict == "small", "16 bits may hide it"


def test_an_adapter_of_zeros_answers_as_the_base():
    zeros = account(q_proj=[(2.0, 0.0), (2.0, 0.0)])
    assert judge(reading(BASE, found=zeros), zeros, None, dtype="float32").verdict == "good"
    near = BASE + 0.5e-3 * SPREAD
    assert judge(reading(near, found=zeros), zeros, None, dtype="float32").verdict == "good"
    judged = judge(reading(found=zeros), zeros, None, dtype="float32")
    assert judged.verdict == "other" and judged.why.startswith(
        "its matrices are zero, and its answers differ from the base's by 1 "
    )


def test_the_account_counts_before_the_answers_and_not_for_a_merged_adapter():
    part = account(q_proj=[(2.0, 3.0), (2.0, 3.0)])
    judged = judge(reading(found=part), FILE, reference(), dtype="float32")
    assert (judged.verdict, judged.why) == ("partial", "missing on the device: v_proj")
    assert verdict(reading(found=part, merged=True), reference()) == "good"
    assert verdict(reading(BASE + 1 + 1.9e-3 * SPREAD, merged=True), reference()) == "good", "rounded together: twice as much"
    assert verdict(reading(BASE + 1 + 2.1e-3 * SPREAD, merged=True), reference()) == "other"


def test_a_reading_that_failed_says_why_and_quarantines_nothing():
    judged = judge(blank("d", "boom", took_s=0.5), FILE, reference(), dtype="float32")
    assert (judged.verdict, judged.why) == ("unread", "it could not be probed: boom")
    assert {"partial", "ignored", "other"} == QUARANTINED


def test_numbers_that_are_not_finite_are_not_answered_with():
    assert verdict(reading(np.full(VALUES, np.nan))) == "other"
    assert verdict(reading(base=np.full(VALUES, np.inf, np.float32))) == "other"


def test_an_engine_without_log_probabilities_is_judged_by_its_account():
    nothing = np.zeros(0, np.float32)
    assert verdict(reading(nothing, base=nothing)) == "good"
    assert verdict(reading(nothing, base=nothing, found=account(q_proj=[(2.0, 3.0), (2.0, 3.0)]))) == "partial"


@pytest.mark.parametrize(
    ("off", "dtype", "made_in", "expected"),
    [
        (0.9e-3, "float32", "float32", "good"),
        (1.1e-3, "float32", "float32", "other"),
        (0.11, "bfloat16", "float32", "good"),
        (0.11, "float32", "bfloat16", "good"),
        (0.13, "bfloat16", "float32", "other"),
    ],
)
def test_answers_within_the_tolerance_of_the_reference_are_good(off, dtype, made_in, expected):
    assert verdict(reading(BASE + 1 + off * SPREAD), reference(dtype=made_in), dtype=dtype) == expected


def test_the_answers_of_the_base_mean_that_the_adapter_is_ignored():
    judged = judge(reading(BASE), FILE, reference(), dtype="float32")
    assert (judged.verdict, judged.why) == ("ignored", "its answers are the base's; at registration they differed by 1")


def test_the_answers_of_another_adapter_are_told_with_the_distance():
    judged = judge(reading(BASE - 1), FILE, reference(), dtype="float32")
    assert (judged.verdict, judged.why) == ("other", "its answers differ from those at registration by 2 (at most 0.00097)")


def test_another_base_is_the_workers_fault():
    judged = judge(reading(base=BASE + 2), FILE, reference(), dtype="float32")
    assert judged.verdict == "base"
    assert judged.why == "the base model's answers on this worker differ from those at registration by 2 (at most 0.00097)"
    assert verdict(reading(base=BASE + 0.9e-3 * SPREAD), reference()) == "good"


def test_an_effect_below_twice_the_tolerance_cannot_be_told_from_the_base():
    effect = BASE + 0.23 * SPREAD
    assert verdict(reading(effect), reference(effect), dtype="bfloat16") == "small"
    assert verdict(reading(BASE), reference(BASE + 0.11 * SPREAD), dtype="bfloat16") == "small"
    effect = BASE + 0.25 * SPREAD
    assert verdict(reading(effect), reference(effect), dtype="bfloat16") == "good"


def test_a_quantized_base_has_more_tolerance():
    off = BASE + 1 + 0.19 * SPREAD
    assert verdict(reading(off), reference(), dtype="float32", quantization="int8") == "good"
    assert verdict(reading(off), reference(), dtype="float32") == "other"
    assert verdict(reading(BASE + 1 + 0.29 * SPREAD), reference(), dtype="float32", quantization="int4") == "good"
