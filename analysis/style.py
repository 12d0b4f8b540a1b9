"""One look for all figures: fonts, colours that colour-blind readers can tell apart, readable axes.

Imports matplotlib; only modules that draw import this one, so that the rest starts fast.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from attnres.counts import FLOP_PER_PFLOPS_DAY

# Okabe and Ito's palette without its yellow, which is too light for lines; black is the baseline's.
COLOURS = ("#222222", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
MUTED = "#6b6b6b"
PNG_DPI = 200

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "analysis",  # the same input gives the same file
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def style() -> AbstractContextManager[None]:
    """`with style(): ...` around everything that draws."""
    return mpl.rc_context(_STYLE)


def look(index: int) -> dict[str, Any]:
    """Colour and marker of the rule at this place (0 is the baseline)."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write name.png and name.svg, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, dict[str, Any]] = {"png": {"dpi": PNG_DPI}, "svg": {"metadata": {"Date": None}}}
    return [_save(figure, folder / f"{name}.{suffix}", suffix, more) for suffix, more in options.items()]


def _save(figure: Figure, path: Path, suffix: str, options: dict[str, Any]) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format=suffix, **options)
        os.replace(temporary, path)
    except OSError as error:  # a full disk does not say which file
        error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return path


def compute_unit(largest_flop: float) -> tuple[float, str]:
    """FLOP per unit, and the unit, in which compute of this size is read best."""
    if largest_flop >= 1e-2 * FLOP_PER_PFLOPS_DAY:
        return FLOP_PER_PFLOPS_DAY, "PFLOP/s-days"
    return 1.0, "FLOP"


def log_axis(axis: Any, low: float, high: float, *, powers: bool = False) -> None:
    """Logarithmic x or y axis from low to high with 4 to 8 labelled round ticks."""
    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    getattr(axis.axes, f"set_{axis.axis_name}lim")(low, high)
    ticks = log_ticks(low, high)
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value, powers)))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(NullLocator())


def log_ticks(low: float, high: float) -> Sequence[float]:
    """Round numbers between low and high, not too near each other: decades, 1-3, 1-2-5, or even steps."""
    exponents = np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5)):
        ticks = [d * 10.0**e for e in exponents for d in digits if low <= d * 10.0**e <= high]
        if len(ticks) >= 3:
            return ticks[:: max(1, len(ticks) // 7)]
    rough = (high - low) / 5
    base = 10.0 ** np.floor(np.log10(rough))
    step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= rough)
    kept: list[float] = []
    for value in np.arange(np.ceil(low / step) * step, high, step):
        if not kept or np.log(value / kept[-1]) > np.log(high / low) / 8:
            kept.append(float(value))
    return kept


def tick_text(value: float, powers: bool) -> str:
    """`2x10^13` where powers are asked for and needed, else the plain number."""
    exponent = int(np.floor(np.log10(value) + 1e-9))
    if not powers or -2 <= exponent <= 3:
        return f"{value:.4g}"
    digit = value / 10.0**exponent
    factor = "" if abs(digit - 1) < 1e-9 else rf"{digit:.3g}\times"
    return rf"${factor}10^{{{exponent}}}$"


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Move label positions apart until neighbours are `gap` apart, each as near to its place as that
    allows."""
    order = np.argsort(positions)
    target = np.asarray(positions, dtype=float)[order] - gap * np.arange(len(positions))
    # Non-decreasing least squares (pool adjacent violators): what remains of the order after the gaps are
    # taken off.
    blocks: list[tuple[float, int]] = []
    for value in target:
        blocks.append((float(value), 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (mean_b, count_b), (mean_a, count_a) = blocks.pop(), blocks.pop()
            count = count_a + count_b
            blocks.append(((mean_a * count_a + mean_b * count_b) / count, count))
    placed = np.concatenate([np.full(count, mean) for mean, count in blocks]) + gap * np.arange(
        len(positions)
    )
    result = np.empty(len(positions))
    result[order] = placed
    return [float(value) for value in result]


def label_ends(axes: Axes, labels: Sequence[tuple[float, str, str]], size: float = 9.5) -> None:
    """Direct labels right of the plot: (y in data, text, colour), moved apart where they would overlap.

    Call it after the limits are set. The labels have the same number of lines, or fewer than the longest.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [float(to_axes.transform((axes.get_xlim()[1], y))[1]) for y, _, _ in labels]
    height_points = axes.get_window_extent().height / axes.figure.dpi * 72
    lines = max(text.count("\n") + 1 for _, text, _ in labels)
    placed = np.array(spread(heights, (1.3 * lines + 0.25) * size / height_points))
    placed += max(0.0, 0.5 * lines * size / height_points - placed.min())
    for (_, text, colour), height, anchor in zip(labels, placed, heights, strict=True):
        axes.annotate(
            text,
            xy=(1.0, anchor),
            xytext=(1.035, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colour,
            fontsize=size,
            linespacing=1.15,
            va="center",
            ha="left",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "shrinkA": 2,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )


def few_ticks() -> MaxNLocator:
    return MaxNLocator(4, steps=[1, 2, 2.5, 5, 10])


def count_formatter() -> FuncFormatter:
    """1,500,000 -> 1.5M."""
    return FuncFormatter(lambda value, _: count_text(value))


def count_text(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
