"""Stage 2: drawing tokens with the Triton kernels against the rules in fp64 and against torch; and the time of each way."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from bench.gpu_stages.bed import Bed
from bench.gpu_stages.draws import Exact, random_logits, random_rules
from bench.gpu_stages.results import Line, Point
from motet.kernels.sampling import PlainDraws
from motet.kernels.triton.sampling import Draws
from motet.kernels.types import DrawRules

VOCAB = 128256
ROWS = 64
NOISES = 4  # for each row
SPREAD = 1.3  # of the logits that random weights give; those of trained models are steeper
TIMED_ROWS = (1, 32, 256)


class Sampling:
    """The point of stage 2 on sampling."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._vocab_size, self._rows = bed.pick((VOCAB, ROWS), (5000, 12))

    def points(self) -> list[Point]:
        return [Point("sampling", self._measure, 120.0)]

    def _measure(self) -> Line:
        return self._compare() | {"us": {str(rows): self._times(rows) for rows in self._bed.pick(TIMED_ROWS, (2,))}}

    def _compare(self) -> Line:
        """`unclear`: draws that rounding decides, and `differ` those of them that are not as in fp64; `torch_differs` the same
        of torch. `good`: all others are as in fp64, and three runs give the same tokens and sums."""
        bed, rng, rows = self._bed, np.random.default_rng(0), self._rows
        logits, rules = random_logits(rng, rows, self._vocab_size), random_rules(rng, rows, self._vocab_size)
        on_device = torch.from_numpy(logits).to(bed.device)
        ours, by_torch = Draws(rules, self._vocab_size, bed.device), PlainDraws(rules, bed.device)
        exact = [Exact(logits[row], rules, row) for row in range(rows)]
        found: Line = {"draws": 0, "unclear": 0, "differ": 0, "torch_differs": 0, "wrong": [], "same_bits": True}
        for noise in rng.random((bed.pick(NOISES, 1), rows)):
            runs = [(ours.draw(on_device, noise)[0].tolist(), ours.workspace.sums.clone()) for _ in range(3)]
            tokens, sums = runs[0]
            found["same_bits"] &= all(again == tokens and torch.equal(same, sums) for again, same in runs[1:])
            others = by_torch.draw(on_device.clone(), noise)[0].tolist()
            for row, (one, token, other) in enumerate(zip(exact, tokens, others, strict=True)):
                want, unclear = one.token(noise[row]), one.unclear(noise[row])
                found["draws"] += 1
                found["unclear"] += unclear
                found["differ"] += unclear and token != want
                found["torch_differs"] += other != want
                if not unclear and token != want:
                    found["wrong"].append(f"row {row}, {one}: {token}, not {want}")
        return found | {"wrong": found["wrong"][:20], "good": not found["wrong"] and found["same_bits"]}

    def _times(self, rows: int) -> Line:
        """Microseconds of a step's draws at temperature 0.8 and top_p 0.95, and of the argmax.

        `kernels` is the launches as a graph, without copies; the rest is until the host has the tokens, from a fresh copy of
        the logits, as torch changes them.
        """
        bed, found = self._bed, dict[str, float]()
        logits = SPREAD * torch.randn(rows, self._vocab_size, device=bed.device)
        noise = np.random.default_rng(0).random(rows)
        work = logits.clone()

        def fresh(draws: Draws | PlainDraws) -> None:
            work.copy_(logits)
            draws.draw(work, noise)

        for name, temperature in (("drawn", 0.8), ("argmax", 0.0)):
            off = np.zeros(rows, np.float32), np.zeros(rows, np.int64)
            rules = DrawRules(np.full(rows, temperature, np.float32), *off, np.full(rows, 0.95))
            ours, by_torch = Draws(rules, self._vocab_size, bed.device), PlainDraws(rules, bed.device)
            found[f"{name}_ours"] = bed.eager_us(partial(fresh, ours))
            found[f"{name}_kernels"] = bed.replayed_us(partial(ours.launch, logits))
            found[f"{name}_torch"] = bed.eager_us(partial(fresh, by_torch))
        return found
