"""The measurement points of each stage, the most valuable first."""

from __future__ import annotations

from bench.gpu_stages.bed import Bed
from bench.gpu_stages.results import Point


def points(stage: int, bed: Bed) -> list[Point]:
    """The points of a stage. Only the modules of that stage are imported, because some need what others run without."""
    if stage == 1:
        from bench.gpu_stages.limits import Limits

        return Limits(bed).points()
    if stage == 2:
        from bench.gpu_stages.attention import Attention
        from bench.gpu_stages.plans import Plans
        from bench.gpu_stages.sampling import Sampling
        from bench.gpu_stages.tokens import Tokens

        plans, attention = Plans(bed), Attention(bed).points()
        first = plans.points()
        return [
            *first[:3],
            attention[0],
            *Sampling(bed).points(),
            *Tokens(bed).points(),
            *attention[1:],
            *first[3:],
            plans.tests(),
        ]
    if stage == 3:
        from bench.gpu_stages.decode import Decode

        return Decode(bed).points()
    if stage == 4:
        from bench.gpu_stages.serving import Serving

        return Serving(bed).points()
    if stage == 5:
        from bench.gpu_stages.cold import Cold

        return Cold(bed).points()
    if stage == 6:
        from bench.gpu_stages.fits import Fits

        return Fits(bed).points()
    if stage == 7:
        from bench.gpu_stages.kernels import Kernels

        return Kernels(bed).points()
    if stage == 8:
        from bench.gpu_stages.peers import Peers

        return Peers(bed).points()
    raise ValueError(f"there is no stage {stage}")
