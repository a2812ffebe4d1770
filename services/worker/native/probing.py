"""Reads the fingerprint of an adapter on the device: a forward pass of a fixed prompt between two steps.

The pass is a step's own: the same kernels, the adapter's slot, and KV blocks that no request gets. So it neither uses nor fills
the prefix cache. `policies.worker.probe` judges the reading.
"""

from __future__ import annotations

import numpy as np
import torch

from motet.policies.worker.probe import Reading, blank, prompt
from motet.services.worker.native.backend import Backend
from motet.services.worker.native.step_batch import StepBatch
from motet.shared.clock import now_s
from motet.shared.telemetry import logger

log = logger("motet.worker.engine")


class NativeProbe:
    """The probe of one backend, which has `probe_blocks`. `block_size`: tokens of a KV block."""

    def __init__(self, runner: Backend, block_size: int) -> None:
        self._runner = runner
        vocab_size: int = runner.config.vocab_size
        self._tokens = np.array(prompt(vocab_size), np.int64)
        self._next = torch.from_numpy(self._tokens[1:, None])
        self._blocks = np.array([runner.probe_blocks], np.int32)  # [1, blocks]
        self._positions = np.arange(len(self._tokens), dtype=np.int64)
        self._kv_slots = self._blocks[0, self._positions // block_size].astype(np.int64) * block_size
        self._kv_slots += self._positions % block_size
        self._base: np.ndarray | None = None

    @property
    def base(self) -> np.ndarray:
        """The base's fingerprint, float32 [VALUES]; computed once."""
        if self._base is None:
            self._base = self._forward(-1)
        return self._base

    def read(self, digest: str, slot: int) -> Reading:
        """The reading of the complete adapter in `slot`. What fails is told by the reading."""
        began_s = now_s()
        try:
            account = self._runner.norms(slot)
            found = self._forward(slot)
            return Reading(digest=digest, base=self.base, adapter=found, account=account, took_s=now_s() - began_s)
        except Exception as error:
            log.exception("an adapter could not be probed", extra={"digest": digest})
            return blank(digest, repr(error), took_s=now_s() - began_s)

    def read_merged(self, digest: str) -> Reading:
        """The reading of the adapter that is merged into a complete copy of the weights."""
        began_s = now_s()
        try:
            found = self._forward(-1, merged=True)
            return Reading(digest=digest, base=self.base, adapter=found, account=None, took_s=now_s() - began_s, merged=True)
        except Exception as error:
            log.exception("a merged adapter could not be probed", extra={"digest": digest})
            return blank(digest, repr(error), took_s=now_s() - began_s, merged=True)

    def _forward(self, slot: int, *, merged: bool = False) -> np.ndarray:
        rows = len(self._tokens)
        batch = StepBatch(
            token_ids=self._tokens,
            positions=self._positions,
            row_slot=np.full(rows, slot, np.int32),
            seq_starts=np.array([0, rows], np.int32),
            context_lens=np.array([rows], np.int32),
            block_tables=self._blocks,
            kv_slots=self._kv_slots,
            logit_rows=np.arange(rows - 1, dtype=np.int64),
            merged=merged,
        )
        logits = self._runner.forward(batch)
        with torch.inference_mode():
            chances = torch.log_softmax(logits.float(), dim=-1)
            return chances.gather(1, self._next.to(chances.device))[:, 0].cpu().numpy()
