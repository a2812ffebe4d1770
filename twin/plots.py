"""Draws the plots of a report with matplotlib, which the extra `plots` installs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator, PercentFormatter

from motet.policies.times.perf_model import Floats

SIZE = (4.8, 2.7)  # inches
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
FAINT = "#6b7280"
STYLE: Any = {  # matplotlib's type of it is a list of some hundred names
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e5e7eb",
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "svg.hashsalt": "motet",  # the same data give the same bytes
}


@dataclass(frozen=True)
class Curve:
    """A line through points (x, y), ascending in x. It may have no points."""

    x: Floats
    y: Floats


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Curves over one pair of axes, in the order of `COLORS`. `share`: y is a share of 1. `marks`: objectives, as x values."""

    caption: str
    curves: Sequence[Curve]
    unit: str  # of x
    log_x: bool = False
    share: bool = False
    marks: Sequence[float] = ()


def svg(plot: Plot) -> bytes:
    """The plot as an SVG file."""
    file = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        _draw(figure, plot)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _draw(figure: Figure, plot: Plot) -> None:
    axes = figure.subplots()
    axes.set_xlabel(plot.unit, loc="right", color=FAINT)
    axes.grid(True)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0) if plot.share else EngFormatter(sep=""))
    for curve, color in zip(plot.curves, COLORS, strict=False):
        axes.plot(curve.x, curve.y, color=color, linewidth=1.3)
    x = np.concatenate([curve.x for curve in plot.curves])
    if not len(x):
        axes.text(0.5, 0.5, "nothing to show", ha="center", color=FAINT, transform=axes.transAxes)
        return
    if plot.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlim(left=max(float(x.min()), 1e-3) if plot.log_x else 0.0)
    axes.set_ylim(bottom=0.0, top=1.0 if plot.share else None)
    for mark in plot.marks:
        if mark < 2 * float(x.max()):  # one that is far away would press the curves together
            axes.axvline(mark, color=FAINT, linewidth=0.8, linestyle="--")
            axes.text(mark, 0.02, "SLO ", ha="right", color=FAINT, transform=axes.get_xaxis_transform())
