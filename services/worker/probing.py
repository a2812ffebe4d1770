"""Lets no adapter answer before its probe: holds back what its requests answer until the engine's reading has been judged.

    engine ──loading──► hold ──reading──► judge ──good──► what was held goes out
                                            └──bad──► error for its requests, off the device, quarantine at the registry

A reading comes with the report of the same step as the first tokens, or of the next one. Its reference is fetched when the
adapter is loaded from its file, so most readings are judged at once. Without a reference the reading becomes it, and its
requests wait until that is stored: of two workers that load a new version at the same time, the second one compares. When
the references cannot be reached, the account alone is judged.

Everything runs on the event loop, but `parsed`, in the threads that read files. While nothing is held a report costs one test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motet.policies.worker.probe import QUARANTINED, Account, Judged, Reading, Reference, judge, made_reference
from motet.policies.worker.request_life import Key
from motet.services.worker import metrics
from motet.services.worker.catalog import Catalog
from motet.services.worker.engines.adapter_account import file_account
from motet.services.worker.engines.protocol import EngineProtocol
from motet.services.worker.engines.request import StepReport
from motet.services.worker.references import References
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import unix_ms
from motet.shared.errors import AdapterNotFound, AdapterQuarantined, MotetError, Unavailable, WorkerFull, WorkerLost, from_info
from motet.shared.telemetry import logger
from motet.shared.wire.refusal import Refused
from motet.shared.wire.registry import QuarantineAdapter, RegistryReply
from motet.shared.wire.stream import StreamItem

log = logger("motet.worker.probe")
FETCH_S = 2.0  # the longest wait for a reference
ASK_S = 5.0
RETRY_S = 60.0  # after which a worker tries an adapter again that it could not probe, or whose base was another one
Put = Callable[[str, int, list[StreamItem]], None]


@dataclass(slots=True)
class _Held:
    """Items of an adapter's requests in order. `unread`: the copy has no reading yet; `judging` readings have no verdict."""

    unread: bool = False
    judging: int = 0
    items: dict[Key, list[tuple[str, StreamItem]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What readings of this worker depend on. `quantization`: of the base's weights."""

    dtype: str
    quantization: str
    described: str  # engine and worker, for people


class Prober:
    """The probes of one worker. `adapter_of(key)`: the digest of the adapter of a request, "" for none; `put` sends items."""

    def __init__(
        self,
        bus: Bus,
        references: References,
        device: Device,
        *,
        worker_id: str,
        engine: EngineProtocol,
        catalog: Catalog,
        adapter_of: Callable[[Key], str],
        put: Put,
    ) -> None:
        self._bus, self._references, self._device, self._worker_id = bus, references, device, worker_id
        self._engine, self._catalog, self._adapter_of, self._put = engine, catalog, adapter_of, put
        self._accounts: dict[str, Account] = {}
        self._known: dict[str, Reference] = {}
        self._held: dict[str, _Held] = {}
        self._cut: set[Key] = set()  # requests that have been told of an error, and not yet by the engine
        self._rejected: dict[str, MotetError] = {}  # adapters whose requests the engine may not have ended yet
        self._step = 0
        catalog.on_released = self.forget

    def parsed(self, parse: Callable[[Path, str], Any]) -> Callable[[Path, str], Any]:
        """`parse` for an adapter store, which also takes the account of the verified file."""

        def parse_and_count(path: Path, digest: str) -> Any:
            self._accounts[digest] = file_account(path)
            return parse(path, digest)

        return parse_and_count

    def expect(self, digest: str) -> None:
        """An adapter is being loaded from its file: fetch its reference."""
        if digest not in self._known:
            self._bus.spawn(self._fetch(digest))

    def forget(self, digest: str) -> None:
        """A version may answer again: its next load makes a new reference, or finds one."""
        self._known.pop(digest, None)
        self._rejected.pop(digest, None)

    def keep(self, digests: Mapping[str, object]) -> None:
        """Exactly these versions are registered."""
        for known in (self._accounts, self._known, self._rejected):
            for digest in [one for one in known if one not in digests]:
                known.pop(digest, None)

    # ---- reports

    def sift(self, report: StepReport) -> Mapping[str, list[StreamItem]]:
        """What of a report's items may go out now, by gateway. Call it before the core learns which requests have ended."""
        output = report.output
        self._step = report.step
        if not (self._held or self._cut or self._rejected or output.loading or output.readings):
            return output.items
        for change in output.residency:
            if change.tier is None and (held := self._held.get(change.digest)) is not None and held.unread:
                held.unread = False
                self._fail(change.digest, WorkerLost(f"adapter {change.digest[:12]} left the device before it was probed"))
        for digest in output.loading:
            self._held.setdefault(digest, _Held()).unread = True
            self._rejected.pop(digest, None)
        for reading in output.readings:
            self._read(reading)
        passed = {gateway: kept for gateway, items in output.items.items() if (kept := self._passed(gateway, items))}
        for change in output.residency:
            if change.tier is None:  # the engine has ended its requests
                self._rejected.pop(change.digest, None)
        return passed

    def _passed(self, gateway: str, items: list[StreamItem]) -> list[StreamItem]:
        return [item for item in items if self._passes(gateway, item)]

    def _passes(self, gateway: str, item: StreamItem) -> bool:
        key = item.request_id, item.epoch
        if key in self._cut:
            if item.finish is not None:
                self._cut.discard(key)
            return False
        if (error := self._rejected.get(self._adapter_of(key))) is not None and item.finish not in ("error", "cancelled"):
            if item.finish is None:
                self._cut.add(key)
            item.tokens, item.finish, item.error, item.logprobs, item.stop_token = [], "error", error.info(), None, None
            return True
        if not self._held or (held := self._held.get(self._adapter_of(key))) is None:
            return True
        before = held.items.get(key)
        if item.finish in ("error", "cancelled"):
            if before:  # nothing of it has gone out
                item.index = before[0][1].index
                del held.items[key]
            return True
        held.items.setdefault(key, []).append((gateway, item))
        return False

    # ---- judging

    def _read(self, reading: Reading) -> None:
        held = self._held.setdefault(reading.digest, _Held())
        if not reading.merged:
            held.unread = False
        held.judging += 1
        reference = self._known.get(reading.digest)
        if reference is not None:
            self._decided(reading, self._judge(reading, reference))
        else:
            self._bus.spawn(self._compare(reading))

    def _judge(self, reading: Reading, reference: Reference | None) -> Judged:
        expected = self._accounts.get(reading.digest)
        return judge(reading, expected, reference, dtype=self._device.dtype, quantization=self._device.quantization)

    async def _fetch(self, digest: str) -> Reference | None:
        try:
            async with asyncio.timeout(FETCH_S):
                found = await self._references.get(digest)
        except (MotetError, TimeoutError):
            return None
        if found is not None:
            self._known[digest] = found
        return found

    async def _compare(self, reading: Reading) -> None:
        try:
            judged = await self._compared(reading)
        except Exception as error:
            log.exception("a reading could not be compared", extra={"digest": reading.digest[:12]})
            judged = Judged("unread", f"it could not be compared: {error!r}")
        self._decided(reading, judged)

    async def _compared(self, reading: Reading) -> Judged:
        digest = reading.digest
        try:
            async with asyncio.timeout(FETCH_S):
                reference = await self._references.get(digest)
                judged = self._judge(reading, reference)
                if reference is None and judged.verdict in ("good", "small") and not reading.merged:
                    device = self._device
                    made = made_reference(reading, dtype=device.dtype, made_by=device.described, now_unix_ms=unix_ms())
                    reference = await self._references.make(digest, made)
                    if reference != made:
                        judged = self._judge(reading, reference)
        except (MotetError, TimeoutError) as error:
            log.warning("an adapter has no reference to compare with", extra={"digest": digest, "error": repr(error)})
            return self._judge(reading, None)
        if reference is not None:
            self._known[digest] = reference
        return judged

    def _decided(self, reading: Reading, judged: Judged) -> None:
        digest, verdict = reading.digest, judged.verdict
        metrics.PROBES.labels(verdict).inc()
        metrics.PROBE_S.observe(reading.took_s)
        held = self._held.get(digest)  # None: they have been told of an error meanwhile
        if held is not None:
            held.judging -= 1
        if verdict in ("good", "small"):
            if verdict == "small":
                log.info("adapter too close to the base model to tell its effect", extra={"digest": digest[:12]})
            if held is not None and not held.unread and not held.judging:
                self._let_out(digest)
            return
        self._known.pop(digest, None)
        log.error("adapter does not answer here", extra={"digest": digest[:12], "verdict": verdict, "reason": judged.why})
        if verdict in QUARANTINED:
            error: MotetError = AdapterQuarantined.of(digest[:12], judged.why)
            self._catalog.refuse(digest, error)
            self._bus.spawn(self._quarantine(digest, judged))
        else:
            error = WorkerFull(f"adapter {digest[:12]} cannot be served by worker {self._worker_id}: {judged.why}")
            self._catalog.refuse(digest, error, retry_s=RETRY_S)
        self._fail(digest, error)
        self._rejected[digest] = error
        self._engine.reject_adapter(digest, error)

    def _let_out(self, digest: str) -> None:
        """Send what was held, one frame for each gateway."""
        frames: dict[str, list[StreamItem]] = {}
        for items in self._held.pop(digest).items.values():
            for gateway, item in items:
                frames.setdefault(gateway, []).append(item)
        for gateway, its_items in frames.items():
            self._put(gateway, self._step, its_items)

    def _fail(self, digest: str, error: MotetError) -> None:
        """End the requests of which something is held, as if none of it had been computed."""
        held = self._held.pop(digest, None)
        for key, items in (held.items if held is not None else {}).items():
            gateway, first = items[0]
            self._put(gateway, self._step, [StreamItem(*key, first.index, [], "error", error=error.info())])
            if items[-1][1].finish is None:
                self._cut.add(key)

    async def _quarantine(self, digest: str, judged: Judged) -> None:
        """Tell the registry, which tells all, until it has heard it."""
        message = QuarantineAdapter(
            digest=digest, name=digest[:12], verdict=judged.verdict, reason=judged.why, worker_id=self._worker_id
        )
        delay_s = 0.5
        while True:
            try:
                reply = await self._bus.request(subjects.registry("quarantine"), message, RegistryReply, timeout_s=ASK_S)
                if not isinstance(reply, Refused):
                    return
                raise from_info(reply.error)
            except AdapterNotFound:
                return
            except (MotetError, Unavailable) as error:
                log.warning(
                    "a quarantine is not known to the registry yet", extra={"digest": digest[:12], "error": repr(error)}
                )
            await asyncio.sleep(delay_s)
            delay_s = min(30.0, 2 * delay_s)
