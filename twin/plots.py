"""Draws the plots of a report with matplotlib, which the extra `plots` installs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from motet.policies.times.perf_model import Floats

SIZE = (4.8, 2.7)  # inches
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
FAINT = "#6b7280"
WRITTEN = 16
"""Columns of a table of shades up to which its numbers are written on it."""
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
    steps: bool = False  # a staircase instead of a line: each value counts up to its x
    plain: bool = False  # x in plain numbers, from the first one on
    names: Sequence[str] = ()  # of the curves, for a legend inside the plot

    def draw(self, axes: Axes) -> None:
        """Draw it."""
        if not self.plain:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0) if self.share else EngFormatter(sep=""))
        for curve, color in zip(self.curves, COLORS, strict=False):
            axes.plot(curve.x, curve.y, color=color, linewidth=1.3, drawstyle="steps-pre" if self.steps else "default")
        if self.names:
            axes.legend(self.names, frameon=False, loc="upper left")
        x = np.concatenate([curve.x for curve in self.curves])
        if not len(x):
            axes.text(0.5, 0.5, "nothing to show", ha="center", color=FAINT, transform=axes.transAxes)
            return
        if self.log_x:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlim(left=float(x.min()) if self.plain else max(float(x.min()), 1e-3) if self.log_x else 0.0)
        axes.set_ylim(bottom=0.0, top=1.0 if self.share else None)
        for mark in self.marks:
            if mark < 2 * float(x.max()):  # one that is far away would press the curves together
                axes.axvline(mark, color=FAINT, linewidth=0.8, linestyle="--")
                axes.text(mark, 0.02, "SLO ", ha="right", color=FAINT, transform=axes.get_xaxis_transform())


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Bars of height 1, divided: `parts` [part][bar], the last part is the rest. Bars are numbered from 1."""

    caption: str
    parts: Sequence[Floats]
    unit: str

    def draw(self, axes: Axes) -> None:
        """Draw them."""
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        places = np.arange(1, len(self.parts[0]) + 1)
        bottom = np.zeros(len(places))
        for part, color in zip((*self.parts, 1.0 - np.sum(self.parts, axis=0)), COLORS, strict=False):
            axes.bar(places, part, bottom=bottom, color=color, width=0.7)
            bottom = bottom + part


@dataclass(frozen=True, kw_only=True)
class Counts:
    """A table of numbers [rows, columns] as shades, with the numbers on them. Columns are numbered from 1."""

    caption: str
    values: Floats
    rows: Sequence[str]
    unit: str

    def draw(self, axes: Axes) -> None:
        """Draw it."""
        axes.grid(False)
        axes.pcolormesh(np.arange(self.values.shape[1] + 1) + 0.5, np.arange(len(self.rows) + 1), self.values, cmap="Blues")
        axes.set_yticks(np.arange(len(self.rows)) + 0.5, list(self.rows))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if self.values.shape[1] > WRITTEN:
            return
        for row, numbers in enumerate(self.values):
            for column, number in enumerate(numbers):
                ink = "white" if number > self.values.max() / 2 else "black"
                axes.text(column + 1, row + 0.5, f"{number:.0f}", ha="center", va="center", color=ink)


def svg(plot: Plot | Shares | Counts) -> bytes:
    """The plot as an SVG file."""
    file = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel(plot.unit, loc="right", color=FAINT)
        axes.grid(True)
        axes.set_axisbelow(True)
        plot.draw(axes)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
