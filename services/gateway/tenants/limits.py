"""Tenants' limits at this gateway: requests per second, tokens per minute, concurrent requests, and fair share.

    turn = limits.begin(tenant)      raises RateLimited before anything is read or tokenized
    turn.spend(prompt tokens)        when they are known
    turn.end(output tokens)          when the answer is complete; turn.fail() returns the tokens instead

Rates are token buckets: one second of requests or one minute of tokens can be used at once, and the bucket refills evenly.
Output tokens are subtracted when they are known, so a bucket can go below zero; the tenant then waits until it is above zero
again. Each gateway applies the limits by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from motet.services.gateway.config import GatewayConfig
from motet.shared.clock import now_s
from motet.shared.config import ConfigError
from motet.shared.errors import ErrorAnswer, Overloaded
from motet.shared.telemetry import counter

TENANTS_MAX = 10_000  # whose use is remembered
FILE_BYTES_MAX = 4 << 20
MINUTE_S = 60.0
CONCURRENT_RETRY_S = 1.0
NEARLY_FULL, ABOVE_MEAN = 0.75, 1.25
"""Above this share of `max_inflight`, a tenant with this many times the mean of requests per weight gets no new request."""

REFUSED = counter(
    "motet_tenant_refusals", "Requests that a tenant's limit refused: requests, tokens, concurrent, share.", ["limit"]
)

Positive = Annotated[float, Meta(gt=0, le=1000)]
Rate = Annotated[float, Meta(ge=0, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant's limits, 0 for none. `weight`: its share of saturated workers, relative to other tenants."""

    requests_per_s: Rate = 0.0
    tokens_per_min: Count = 0
    concurrent_requests: Count = 0
    weight: Positive = 1.0


class RateLimited(Overloaded):
    """The tenant reached a limit; worded as in OpenAI's API. `limit` is "requests" or "tokens"."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, limit: str, retry_after_s: float, headers: dict[str, str]) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limit, self.headers = limit, headers

    def openai(self) -> ErrorAnswer:
        return ErrorAnswer(error=msgspec.structs.replace(super().openai().error, type=self.limit))


class Limits:
    """Every tenant's limits and use. `inflight` says how many sequences this gateway has."""

    def __init__(self, config: GatewayConfig, inflight: Callable[[], int] = lambda: 0) -> None:
        self._default = TenantLimits(
            requests_per_s=config.tenants.tenant_requests_per_s,
            tokens_per_min=config.tenants.tenant_tokens_per_min,
            concurrent_requests=config.tenants.tenant_concurrent_requests,
        )
        self._own = _read(config.tenants.tenant_limits_file, self._default) if config.tenants.tenant_limits_file else {}
        self._inflight, self._nearly_full = inflight, NEARLY_FULL * config.requests.max_inflight
        self._use: dict[str, _Use] = {}

    def of(self, tenant: str) -> TenantLimits:
        """The limits of this tenant."""
        return self._own.get(tenant, self._default)

    def begin(self, tenant: str) -> Turn:
        """Begin a request of `tenant`.

        Raises RateLimited, or Overloaded for a tenant above its share of a nearly full gateway.
        """
        now, limits = now_s(), self.of(tenant)
        use = self._use.get(tenant)
        if use is None:
            if len(self._use) >= TENANTS_MAX:
                self._use = {name: one for name, one in self._use.items() if one.running or not one.full(now)}
            use = self._use[tenant] = _Use(limits, now)
        if limits.concurrent_requests and use.running >= limits.concurrent_requests:
            self._refuse(use, now, "concurrent", f"{limits.concurrent_requests} requests at once", CONCURRENT_RETRY_S)
        if use.tokens is not None and (wait_s := use.tokens.until(1.0, now)) > 0:
            self._refuse(use, now, "tokens", f"{limits.tokens_per_min} tokens per minute", wait_s)
        if self._inflight() >= self._nearly_full and self._above_share(tenant, use):
            REFUSED.labels("share").inc()
            raise Overloaded("this gateway is nearly full and this tenant is above its share", retry_after_s=1.0)
        if use.requests is not None:
            if (wait_s := use.requests.until(1.0, now)) > 0:
                self._refuse(use, now, "requests", f"{limits.requests_per_s:g} requests per second", wait_s)
            use.requests.take(1.0, now)
        use.running += 1
        return Turn(use)

    @staticmethod
    def _refuse(use: _Use, now: float, limit: str, what: str, wait_s: float) -> None:
        REFUSED.labels(limit).inc()
        raise RateLimited(
            f"Rate limit reached: {what}. Please try again in {shown(wait_s)}.",
            limit="tokens" if limit == "tokens" else "requests",
            retry_after_s=wait_s,
            headers=use.headers(now),
        )

    def _above_share(self, tenant: str, use: _Use) -> bool:
        running = {name: one.running for name, one in self._use.items() if one.running or name == tenant}
        weight = {name: self.of(name).weight for name in running}
        mean = sum(running.values()) / sum(weight.values())
        return len(running) > 1 and use.running / weight[tenant] > ABOVE_MEAN * mean


class Turn:
    """A tenant's request from `begin` to its end. Only the first call that ends it counts."""

    def __init__(self, use: _Use) -> None:
        self._use, self._spent, self._ended = use, 0, False

    def spend(self, tokens: int) -> None:
        """Subtract the tokens of the prompt."""
        self._spent += tokens
        self._use.take_tokens(tokens)

    def headers(self) -> dict[str, str]:
        """OpenAI's x-ratelimit-* headers for the tenant's limits."""
        return self._use.headers(now_s())

    def end(self, output_tokens: int = 0) -> None:
        """The answer is complete, or its client has disconnected."""
        if not self._ended:
            self._ended = True
            self._use.running -= 1
            self._use.take_tokens(output_tokens)

    def hand_over(self) -> Turn:
        """A new turn for the same request, which another task will end instead of this one."""
        other = Turn(self._use)
        other._spent, self._ended = self._spent, True
        return other

    def fail(self) -> None:
        """The request failed: end it and return its tokens."""
        self.end(-self._spent)


class UntilSent(Response):
    """A response that calls a function once it has been sent or its client has disconnected."""

    def __init__(self, answer: Response, then: Callable[[], None]) -> None:
        self._answer, self._then = answer, then
        self.status_code, self.raw_headers, self.background = answer.status_code, answer.raw_headers, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        finally:
            self._then()


class _Bucket:
    """At most `capacity`, flowing back in `period_s`."""

    __slots__ = ("_at_s", "_level", "capacity", "per_s")

    def __init__(self, capacity: float, per_s: float, now: float) -> None:
        self.capacity, self.per_s = capacity, per_s
        self._level, self._at_s = capacity, now

    def level(self, now: float) -> float:
        self._level = min(self.capacity, self._level + (now - self._at_s) * self.per_s)
        self._at_s = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def until(self, level: float, now: float) -> float:
        """Seconds until the bucket contains this amount; 0: now."""
        return max(0.0, (level - self.level(now)) / self.per_s)


class _Use:
    """What one tenant has used. A bucket is None where there is no limit."""

    def __init__(self, limits: TenantLimits, now: float) -> None:
        rate, tokens = limits.requests_per_s, limits.tokens_per_min
        self.requests = _Bucket(max(1.0, rate), rate, now) if rate else None
        self.tokens = _Bucket(float(tokens), tokens / MINUTE_S, now) if tokens else None
        self.running = 0

    def full(self, now: float) -> bool:
        """Whether all buckets are full, as if nothing had been used."""
        return all(bucket is None or bucket.level(now) >= bucket.capacity for bucket in (self.requests, self.tokens))

    def take_tokens(self, tokens: int) -> None:
        if self.tokens is not None and tokens:
            self.tokens.take(tokens, now_s())

    def headers(self, now: float) -> dict[str, str]:
        headers = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(int(bucket.capacity))
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level(now))))
                headers[f"x-ratelimit-reset-{name}"] = shown(bucket.until(bucket.capacity, now))
        return headers


def shown(seconds: float) -> str:
    """A duration as OpenAI writes it: 120ms, 1s, 6m0s."""
    if seconds < 1.0:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _read(path: str, default: TenantLimits) -> dict[str, TenantLimits]:
    """The file's limits by tenant; missing fields have the common values. Raises ConfigError naming tenant and field."""
    try:
        data = Path(path).read_bytes()
        if len(data) > FILE_BYTES_MAX:
            raise ConfigError(f"--tenant-limits-file: {path} is larger than {FILE_BYTES_MAX} bytes")
        given = msgspec.json.decode(data, type=dict[str, dict[str, Any]])
    except OSError as error:
        raise ConfigError(f"--tenant-limits-file: {error.strerror}: {path}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--tenant-limits-file: {path}: {error}") from None
    limits = {}
    for tenant, fields in given.items():
        try:
            limits[tenant] = msgspec.convert(msgspec.structs.asdict(default) | fields, TenantLimits)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--tenant-limits-file: {tenant}: {error}") from None
    return limits
