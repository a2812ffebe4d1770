"""Judges whether an adapter on a device is the one that was registered, and all of it.

    account       for each module and layer the Frobenius norms of A and of scale * B: of the verified file, and on the device
    fingerprint   log-probabilities of each token of the fixed `prompt` after those before it: with the adapter, and of the base
    reference     the fingerprint at the first load of this version on any worker, kept beside the registry's record

    judge         accounts differ                                       partial     something was left out or changed
                  the base answers otherwise than the reference's       base        the fault is this worker's base model
                  as the reference, within the tolerance                good        or `small`: too close to the base to tell
                  otherwise: as the base alone                          ignored
                  otherwise                                             other       another adapter

A distance is the root mean square of the differences of two fingerprints. The tolerance is a share of the spread of the base's
log-probabilities, which rounding errors grow with; the coarser type of both fingerprints gives the share. Adapters whose
effect is below twice the tolerance cannot be told from the base, so they are reported and served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

PROMPT_TOKENS = 16
VALUES = PROMPT_TOKENS - 1
"""Numbers of a fingerprint."""
Verdict = Literal["good", "small", "partial", "ignored", "other", "base", "unread"]
QUARANTINED: frozenset[Verdict] = frozenset({"partial", "ignored", "other"})
"""Verdicts about an adapter. "base" and "unread" are about a worker: others may serve the adapter."""

Account = Mapping[str, np.ndarray]
"""{module: float64 [layers, 2]}: norms of A and of scale * B, 0 where a layer is not adapted."""

SHARES = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 0.12}
"""Tolerance by type, as a share of the spread of the base's log-probabilities: more than twice the largest difference between
kernels and types that was measured (bench/results/probe.md)."""
QUANTIZED_SHARES = {"none": 0.0, "int8": 0.2}
QUANTIZED_SHARE = 0.3
"""The least share where the base's weights are whole numbers, since activations are rounded too; that of any other kind."""
NORM_SHARES = {"float32": 1e-4}
NORM_SHARE = 2e-3
"""Relative difference of norms that a cast may cause, by the device's type; 16 bits keep 8 or 11 of them."""
FLOOR = 1e-5
"""The least tolerance: what float32 leaves of a log-probability near -10."""
SHOWN = 3
"""Modules that a reason names."""


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """The fingerprints at the first load, float32 [VALUES] as little-endian bytes."""

    base: bytes
    adapter: bytes
    dtype: str
    made_by: str  # engine and worker, for people
    made_unix_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What an engine read after a load. `account` None: this engine cannot tell. `error`: why nothing was read.

    An engine without log-probabilities (of a pooling model) has empty fingerprints.
    """

    digest: str
    base: np.ndarray  # float32 [VALUES]
    adapter: np.ndarray  # float32 [VALUES]
    account: Account | None
    took_s: float = 0.0
    error: str = ""
    merged: bool = False  # of the adapter in the weights


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict and its reason, for people."""

    verdict: Verdict
    why: str = ""


def prompt(vocab_size: int) -> list[int]:
    """The token ids of the probe: fixed, and spread over the vocabulary."""
    return [(11 + 2654435761 * i) % vocab_size for i in range(PROMPT_TOKENS)]


def packed(values: np.ndarray) -> bytes:
    """A fingerprint as bytes."""
    return values.astype("<f4").tobytes()


def unpacked(data: bytes) -> np.ndarray:
    """The fingerprint of `packed` bytes."""
    return np.frombuffer(data, "<f4")


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Root mean square of the differences; infinite when either is not finite, or of different length."""
    if one.shape != other.shape or not (np.isfinite(one).all() and np.isfinite(other).all()):
        return float("inf")
    return float(np.sqrt(np.mean(np.square(one.astype(np.float64) - other))))


def tolerance(base: np.ndarray, *dtypes: str, quantization: str = "none") -> float:
    """The largest distance between two readings of one adapter, on devices of these types."""
    share = max(SHARES.get(dtype, max(SHARES.values())) for dtype in dtypes)
    share = max(share, QUANTIZED_SHARES.get(quantization, QUANTIZED_SHARE))
    return max(FLOOR, share * float(np.std(base.astype(np.float64))))


def compare_accounts(expected: Account, found: Account, dtype: str) -> str:
    """What of the file is not on the device as it should be; "" when everything is."""
    share = NORM_SHARES.get(dtype, NORM_SHARE)
    missing: list[str] = []
    altered: list[str] = []
    for module in sorted({*expected, *found}):
        want, got = expected.get(module), found.get(module)
        if want is None or got is None or want.shape != got.shape:
            (missing if got is None or not np.any(got) else altered).append(module)
            continue
        off = np.abs(got - want) > share * np.maximum(want, got)
        for layer in np.flatnonzero(off.any(axis=1)).tolist():
            gone = ((got[layer] == 0) & (want[layer] > 0)).any()
            (missing if gone else altered).append(f"layers.{layer}.{module}")
    said = [f"{what} on the device: {_names(names)}" for what, names in (("missing", missing), ("altered", altered)) if names]
    return "; ".join(said)


def is_zero(account: Account) -> bool:
    """Whether the adapter changes nothing, as a freshly initialised one: in each layer A or B is zero."""
    return not any(np.prod(norms, axis=1).any() for norms in account.values())


def judge(
    reading: Reading, expected: Account | None, reference: Reference | None, *, dtype: str, quantization: str = "none"
) -> Judged:
    """Judge a reading. `expected`: of the verified file; `dtype`: of the device; `quantization`: of the base's weights there.

    Without a reference only the account is compared, and whether there is any effect.
    """
    if reading.error:
        return Judged("unread", f"it could not be probed: {reading.error}")
    if expected is not None and reading.account is not None and not reading.merged:
        differs = compare_accounts(expected, reading.account, dtype)
        if differs:
            return Judged("partial", differs)
    if not reading.base.size:
        return Judged("good")
    if not (np.isfinite(reading.adapter).all() and np.isfinite(reading.base).all()):
        return Judged("other", "its answers are not finite numbers")
    if reference is not None:
        return _against(reading, reference, dtype, quantization)
    if expected is not None and is_zero(expected):
        far = distance(reading.adapter, reading.base)
        if far > (most := tolerance(reading.base, dtype, quantization=quantization)):
            return Judged(
                "other", f"its matrices are zero, and its answers differ from the base's by {far:.2g} (at most {most:.2g})"
            )
        return Judged("good")
    if np.array_equal(reading.adapter, reading.base):
        if expected is not None and _weighs(expected, dtype):
            return Judged("ignored", "its matrices are not zero, and its answers are the base's")
        return Judged("small")
    return Judged("good")


def _against(reading: Reading, reference: Reference, dtype: str, quantization: str) -> Judged:
    base, adapter = unpacked(reference.base), unpacked(reference.adapter)
    most = tolerance(base, dtype, reference.dtype, quantization=quantization)
    if reading.merged:  # weights and update are rounded together
        most *= 2
    if (far := distance(reading.base, base)) > most:
        why = f"the base model's answers on this worker differ from those at registration by {far:.2g} (at most {most:.2g})"
        return Judged("base", why)
    far, effect = distance(reading.adapter, adapter), distance(adapter, base)
    if far <= most:
        return Judged("good" if effect > 2 * most else "small")
    if distance(reading.adapter, reading.base) <= most:
        return Judged("ignored", f"its answers are the base's; at registration they differed by {effect:.2g}")
    return Judged("other", f"its answers differ from those at registration by {far:.2g} (at most {most:.2g})")


def _weighs(account: Account, dtype: str) -> bool:
    """Whether an update is so large that rounding cannot hide it: compared with the norm of a usual weight matrix."""
    share = 1e-4 if dtype == "float32" else 5e-2
    return any(float(np.prod(norms, axis=1).max()) > share * len(norms) for norms in account.values())


def _names(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def made_reference(reading: Reading, *, dtype: str, made_by: str, now_unix_ms: int) -> Reference:
    """The reference that later loads are compared with."""
    return Reference(
        base=packed(reading.base),
        adapter=packed(reading.adapter),
        dtype=dtype,
        made_by=made_by,
        made_unix_ms=now_unix_ms,
    )


def blank(digest: str, error: str, *, took_s: float = 0.0, **more: Any) -> Reading:
    """A reading that failed."""
    nothing = np.zeros(0, np.float32)
    return Reading(digest=digest, base=nothing, adapter=nothing, account=None, took_s=took_s, error=error, **more)
